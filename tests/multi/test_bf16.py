"""Products in bfloat16 on meshes, against one process.

Rounding is not continuous: an input of a product that lies within float32's error of the middle between two values of
bfloat16 may go to either, and then differs by 2**-7 of itself; a few in 100,000 do so in the first product, each moves
what the next product rounds, and in a deep model all that is left in common is bfloat16's accuracy. So there are two
claims, with limits of their own:

- With the rounding replaced by a continuous change of the same inputs (`tests.parity.mutations.products_bent`), every
  mesh equals one process as in float32: each number is bent once, at the right place, and sums are complete.
- With the rounding itself, meshes are as close as two roundings can be: see `tests.parity.condition`.

`make parity` runs the further meshes.
"""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import STEPS, Case, compare, compare_gradients, few, many_processes, one_process, run_cases
from tests.parity.condition import bf16_gradient_limits, bf16_metric_limits, check_bf16_metrics, nudged
from tests.parity.curve import CURVE, check_curve
from tests.parity.points import point

BF16 = "--engine.precision=bf16"
RUN: dict[str, Any] = {"stage": "tokens", "tied": True, "optimizer": "sgd"}
MESHES = few(
    {
        "tp2 sp recompute": point(tp=2, sequence_parallel=True, recompute="full", **RUN),
        "pp2": point(pp=2, **RUN),
        "stage3": point(sharding="stage3", data_ranks=2, micro_batch_size=2, **RUN),
        "tp2": point(tp=2, recompute="selective", **RUN),
        "stage1": point(sharding="stage1", data_ranks=2, offload=True, **RUN),
        "pp4": point(pp=4, schedule="FThenB", **RUN),
        "tp2 pp2 stage2": point(tp=2, pp=2, sharding="stage2", data_ranks=2, sequence_parallel=True, **RUN),
        "interleaved stage3": point(pp=2, schedule="interleaved", sharding="stage3", data_ranks=2, **RUN),
    },
    "tp2", "stage1", "pp4", "tp2 pp2 stage2", "interleaved stage3",
)  # fmt: skip
FUSED = "fused tp2"


def of(case: Case, name: str, mutation: str | None = None, **more: Any) -> Case:
    """A case in bf16."""
    return dataclasses.replace(case, name=name, words=[*case.words, BF16], mutation=mutation, **more)


ONE = one_process(next(iter(MESHES.values())))


def _fused(mutation: str | None, name: str) -> Case:
    """Projections of one input share an operation."""
    case = of(many_processes(point(tp=2, micro_batch_size=2, **RUN)), name, mutation)
    return dataclasses.replace(case, words=[*case.words, "--parallel.fuse_projections=true"])


def _many(mesh: str, mutation: str | None = None) -> Case:
    name = f"{mesh}, {mutation or 'bf16'}"
    return _fused(mutation, name) if mesh == FUSED else of(many_processes(MESHES[mesh]), name, mutation)


BENT = "products_bent"
NAMES = [*MESHES, FUSED]


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ones = [ONE, of(ONE, "one, bf16"), of(ONE, "one, bent", BENT), of(ONE, "one, rounded", "products_by_rounding")]
    cases = [*ones, *nudged(ONE), *(_many(mesh, mutation) for mesh in NAMES for mutation in (None, BENT))]
    failed = run_cases(runner, cases)
    checkpoint = "checkpoints/step-1"
    shutil.copytree(runner.directory / "one, bf16" / checkpoint, runner.directory / "again" / checkpoint)
    return failed | run_cases(runner, [of(ONE, "again", resume=True)])


@pytest.mark.parametrize("mesh", NAMES)
def test_what_is_rounded_is_the_same_on_a_mesh(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    names = "one, bent", f"{mesh}, {BENT}"
    assert not {*names} & failed.keys(), failed
    found = compare(runner, *names)
    print(f"{mesh}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []


@pytest.mark.parametrize("mesh", NAMES)
def test_a_mesh_is_as_close_as_rounding_allows(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    one = "one, bf16"
    many = f"{mesh}, bf16"
    assert not {one, many} & failed.keys(), failed
    _check_close(runner, one, many)


def test_rounding_by_hand_is_the_same_rounding(runner: Runner, failed: dict[str, str]) -> None:
    """Processors with and without instructions differ in the order of sums only."""
    assert not {"one, bf16", "one, rounded"} & failed.keys(), failed
    _check_close(runner, "one, bf16", "one, rounded")


def _check_close(runner: Runner, one: str, many: str) -> None:
    check_bf16_metrics(runner, one, many, bf16_metric_limits(runner, ONE))
    of_gradients = bf16_gradient_limits(runner, ONE)
    found = compare_gradients(runner, one, many, 0.0, of_gradients)
    print(f"gradients {found.gradients:.1e} of at most {min(of_gradients.values()):.1e}")
    assert found.problems == []


def test_bf16_is_not_float32(runner: Runner, failed: dict[str, str]) -> None:
    """It is off by more than float32 explains, and by less than its own rounding: products are in bfloat16."""
    assert not {ONE.name, "one, bf16"} & failed.keys(), failed
    gradients = compare_gradients(runner, ONE.name, "one, bf16", 0.0, bf16_gradient_limits(runner, ONE))
    print(f"gradients {gradients.gradients:.1e}")
    assert gradients.problems == []
    assert gradients.gradients > 1e-3


def test_it_is_continued_bit_by_bit(runner: Runner, failed: dict[str, str]) -> None:
    names = "one, bf16", "again"
    assert not {*names} & failed.keys(), failed
    for stem in ("model", "optimizer"):
        whole, again = (runner.weights(name, STEPS, stem) for name in names)
        assert whole.keys() == again.keys()
        for name, value in whole.items():
            assert value.dtype == "float32"
            assert value.tobytes() == again[name].tobytes(), name
    first = runner.weights("one, bf16", 1)
    assert all((value != first[name]).any() for name, value in runner.weights("again", STEPS).items())


def test_the_loss_falls_as_in_float32(runner: Runner) -> None:
    assert run_cases(runner, [CURVE, of(CURVE, "curve, bf16")]) == {}
    check_curve(runner, "curve, bf16")
