"""Training without float32 masters (`train.master_weights: false`) on processes that stand in for GPUs.

Gradients are added up in bfloat16: those of micro-batches by one process, those of ranks by a message. With two
sequences in a step there is one addition in either case, so two data ranks have the bits of one process, whatever is
sharded; so have pipelines, which compute the same numbers elsewhere. With eight sequences the additions come in another
order. Each rounds a sum to 2**-9 of itself, so gradients differ by a few of these: 2**-7 of their norm. Tensor parallel
ranks round parts of sums, and are as close as two roundings can be, see `tests.parity.condition`.
"""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import (
    STEPS,
    Case,
    compare_gradients,
    few,
    first_gradients,
    many_processes,
    norm,
    once,
    one_process,
    plan_of,
    run_cases,
)
from tests.parity.condition import bf16_gradient_limits, nudged
from tests.parity.planned import LIMIT, truth_of
from tests.parity.points import point
from tests.support.standin_runs import of

RUN: dict[str, Any] = {"stage": "tokens", "tied": False, "optimizer": "adamw", "micro_batch_size": 1}
TWO = ("--train.global_batch_size=2",)
EXACT = {
    "dp2": point(data_ranks=2, **RUN),
    "stage1": point(sharding="stage1", data_ranks=2, **RUN),
    "stage2": point(sharding="stage2", data_ranks=2, **RUN),
    "stage3": point(sharding="stage3", data_ranks=2, recompute="full", **RUN),
    "pp2": point(pp=2, **RUN),
    "pp2 stage3": point(pp=2, sharding="stage3", data_ranks=2, **RUN),
}
CLOSE = few(
    {
        "dp2, eight": point(data_ranks=2, **RUN),
        "stage2, eight": point(sharding="stage2", data_ranks=2, **RUN),
        "tp2 sp": point(tp=2, sequence_parallel=True, **RUN),
    },
    "stage2, eight",
)
SUMS = 2.0**-7


def without_masters(case: Case, name: str, *words: str, **more: Any) -> Case:
    case = of(case, name, **more)
    return dataclasses.replace(case, words=once([*case.words, "--train.master_weights=false", *words]))


ONE = one_process(next(iter(EXACT.values())))
SMALL = dataclasses.replace(ONE, words=once([*ONE.words, "--train.micro_batch_size=1"]))
IN_8_BITS = ("--train.optimizer=adamw_8bit", "--model.config.hidden_size=64", "--model.config.intermediate_size=96")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    cases = [ONE, *nudged(ONE), without_masters(SMALL, "one", *TWO, trace=True), without_masters(SMALL, "one, eight")]
    cases += [of(SMALL, "with masters")]
    for mesh, chosen in EXACT.items():
        cases.append(without_masters(many_processes(chosen), mesh, *TWO, trace=True))
    cases += [without_masters(many_processes(chosen), mesh) for mesh, chosen in CLOSE.items()]
    cases += [without_masters(SMALL, "one, 8 bits", *TWO, *IN_8_BITS)]
    cases += [without_masters(many_processes(EXACT["stage2"]), "stage2, 8 bits", *TWO, *IN_8_BITS)]
    failed = run_cases(runner, cases)
    again = []
    for name, begun, mesh in (
        ("again", "one", None),
        ("again, 8 bits", "one, 8 bits", None),
        ("on two", "one", "stage1"),
    ):
        shutil.copytree(runner.directory / begun / "checkpoints/step-1", runner.directory / name / "checkpoints/step-1")
        case = SMALL if mesh is None else many_processes(EXACT[mesh])
        again.append(without_masters(case, name, *TWO, *(IN_8_BITS if "8" in name else ()), resume=True))
    return failed | run_cases(runner, again)


def equal(runner: Runner, one: str, many: str, step: int = STEPS) -> None:
    """Parameters and state have the same bits."""
    for stem in ("model", "optimizer"):
        ours, theirs = (runner.weights(name, step, stem) for name in (one, many))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype, name
            assert value.tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("mesh", EXACT)
def test_a_mesh_has_the_bits_of_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    assert not {"one", mesh} & failed.keys(), failed
    equal(runner, "one", mesh)


@pytest.mark.parametrize("mesh", EXACT)
def test_a_run_is_as_planned(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    """What ranks send, in which order, and what they keep between steps; the stand-in has copies of what is sent."""
    assert mesh not in failed, failed
    found = truth_of(runner.directory / mesh, plan_of(without_masters(many_processes(EXACT[mesh]), mesh, *TWO)))
    assert found.problems == []
    assert abs(found.memory["between_steps"]) <= LIMIT


def test_one_process_has_the_memory_that_is_planned(runner: Runner, failed: dict[str, str]) -> None:
    """Parameters, moments and gradients of 2 bytes. Activations are those of plain operations, not of a GPU's."""
    assert "one" not in failed, failed
    found = truth_of(runner.directory / "one", plan_of(without_masters(SMALL, "one", *TWO)))
    assert abs(found.memory["between_steps"]) <= LIMIT
    assert abs(found.memory["gradients"]) <= LIMIT


@pytest.mark.parametrize("mesh", CLOSE)
def test_sums_in_another_order_are_close(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    assert not {ONE.name, "one, eight", mesh} & failed.keys(), failed
    limits = bf16_gradient_limits(runner, ONE) if "tp" in mesh else {}
    found = compare_gradients(runner, "one, eight", mesh, SUMS, limits)
    print(f"{mesh}: gradients {found.gradients:.1e}")
    assert found.problems == []
    for ours, theirs in zip(runner.metrics("one, eight"), runner.metrics(mesh), strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=2.0**-8)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=4 * SUMS)


def test_gradients_are_those_with_masters_but_for_rounded_sums(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one, eight", "with masters"} & failed.keys(), failed
    (exact,), (rounded,) = first_gradients(runner, "with masters"), first_gradients(runner, "one, eight")
    far = {name: norm(rounded[name] - value) / norm(value) for name, value in exact.items()}
    print(f"gradients differ by {max(far.values()):.1e}")
    assert 2.0**-10 < max(far.values()) < SUMS


def test_files_have_16_bits_and_no_masters(runner: Runner, failed: dict[str, str]) -> None:
    assert "one" not in failed, failed
    state = runner.weights("one", STEPS, "optimizer")
    assert {name.rpartition("/")[2] for name in state} == {"beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2"}
    for name, value in state.items():
        assert value.dtype.name == ("float32" if name.endswith("pow_acc") else "bfloat16"), name
    first, last = (runner.weights("one", step, "model") for step in (1, STEPS))
    assert all(value.dtype.name == "bfloat16" for value in last.values())
    assert any((first[name] != value).any() for name, value in last.items())


def test_a_run_is_resumed_bit_by_bit(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one", "again", "on two", "again, 8 bits"} & failed.keys(), failed
    equal(runner, "one", "again")
    equal(runner, "one", "on two")
    equal(runner, "one, 8 bits", "again, 8 bits")


def test_moments_in_8_bits(runner: Runner, failed: dict[str, str]) -> None:
    """Codes of large matrices, float32 for the others, as with bitsandbytes; on two ranks the same."""
    assert not {"one, 8 bits", "stage2, 8 bits"} & failed.keys(), failed
    equal(runner, "one, 8 bits", "stage2, 8 bits")
    moments = {n: v for n, v in runner.weights("one, 8 bits", STEPS, "optimizer").items() if "/moment1" in n}
    assert {value.dtype for value in moments.values()} == {np.dtype("int8"), np.dtype("float32")}
