"""The 16-bit policy of GPUs on meshes of CPU processes that stand in for them (`tests.standin`).

With one sequence in a micro-batch, every mesh that cuts no matrix computes the same 16-bit numbers as one process, and
adds them up in float32: so the first step equals one process as in float32. Its update differs by float32's rounding,
which moves a few of the 16-bit parameters to their neighbours: of numbers known to 2**-24, rounded to 2**-8, a share of
2**-16. Tensor parallel ranks round parts of sums, and one process adds up the two gradients of a tied embedding in 16
bits: those meshes are as close as two roundings can be, see `tests.parity.condition`.

`make parity` runs the further meshes.
"""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import (
    GRADIENT_LIMIT,
    STEPS,
    Case,
    compare_gradients,
    many_processes,
    norm,
    once,
    one_process,
    run_cases,
)
from tests.parity.condition import bf16_gradient_limits, nudged
from tests.parity.mutations import OF_16_BITS
from tests.parity.points import point
from tests.support.standin_runs import MESHES, ONE, RUN, of, problems

FP16 = 2.0**-3
"""Largest error of a rounding to fp16 beside one to bf16."""
TIED = point(pp=2, **{**RUN, "tied": True})


def small(case: Case) -> Case:
    """With one sequence in a micro-batch."""
    return dataclasses.replace(case, words=once([*case.words, "--train.micro_batch_size=1"]))


SMALL = small(ONE)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    cases = [ONE, *nudged(ONE), of(SMALL, "one"), of(SMALL, "one, fp16", precision="fp16")]
    cases += [of(many_processes(MESHES[mesh]), mesh) for mesh in MESHES]
    cases += [of(many_processes(MESHES["pp2"]), "pp2, fp16", precision="fp16")]
    cases += [of(small(one_process(TIED)), "one, tied"), of(many_processes(TIED), "pp2, tied")]
    cases += [of(SMALL, mutation, mutation) for mutation in OF_16_BITS]
    cases += [of(many_processes(MESHES["stage3"]), "stage3, sums", "sums_in_16_bits")]
    failed = run_cases(runner, cases)
    checkpoint = "checkpoints/step-1"
    assert "one" not in failed, failed["one"]
    shutil.copytree(runner.directory / "one" / checkpoint, runner.directory / "again" / checkpoint)
    return failed | run_cases(runner, [of(SMALL, "again", resume=True)])


def test_a_tied_embedding_on_two_stages(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one, tied", "pp2, tied"} & failed.keys(), failed
    assert problems(runner, "one, tied", "pp2, tied", cuts=True) == []


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    assert not {ONE.name, "one", mesh} & failed.keys(), failed
    assert problems(runner, "one", mesh, "tp" in mesh) == []


def test_fp16_on_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str]) -> None:
    """Its numbers are so close to each other that after an update many more parameters move to their neighbours, and
    each has others rounded otherwise behind it: later steps are as close as two roundings to fp16."""
    assert not {"one, fp16", "pp2, fp16"} & failed.keys(), failed
    assert problems(runner, "one, fp16", "pp2, fp16", later=FP16) == []


def test_16_bits_are_close_to_float32_and_not_float32(runner: Runner, failed: dict[str, str]) -> None:
    assert not {ONE.name, "one"} & failed.keys(), failed
    assert problems(runner, ONE.name, "one", cuts=True) == []
    assert compare_gradients(runner, ONE.name, "one", 0.0, bf16_gradient_limits(runner, ONE)).gradients > 1e-3


def test_files_have_the_parameters_in_16_bits_and_masters(runner: Runner, failed: dict[str, str]) -> None:
    masters = {k: v for k, v in runner.weights("one", STEPS, "optimizer").items() if k.endswith("/master")}
    assert masters
    assert all(value.dtype == "float32" for value in masters.values())
    lost = [(value.view("uint32") & 0xFFFF).any() for value in masters.values()]
    assert all(lost), "a master has bits that its parameter has not"


def test_it_is_continued_bit_by_bit(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one", "again"} & failed.keys(), failed
    whole, again = (runner.weights(name, STEPS, "optimizer") for name in ("one", "again"))
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        assert value.tobytes() == again[name].tobytes(), name


def moved(runner: Runner, name: str) -> dict[str, np.ndarray]:
    """What the steps behind the first have changed in each master."""
    first, last = (runner.weights(name, step, "optimizer") for step in (1, STEPS))
    return {key: value.astype("float64") - first[key] for key, value in last.items() if key.endswith("/master")}


def test_without_masters_it_goes_red(runner: Runner, failed: dict[str, str]) -> None:
    right = moved(runner, "one")
    wrong = moved(runner, "no_masters")
    far = max(norm(wrong[name] - change) / norm(change) for name, change in right.items())
    print(f"changes are off by {far:.1e}")
    assert far > 0.1


def test_with_sums_in_16_bits_it_goes_red(runner: Runner, failed: dict[str, str]) -> None:
    found = compare_gradients(runner, "one", "stage3, sums")
    print(f"gradients are off by {found.gradients:.1e}")
    assert found.gradients > 100 * GRADIENT_LIMIT


def test_wide_activations_are_refused(failed: dict[str, str]) -> None:
    assert "the GPU's kernel refuses this" in failed["wide_embedding"]
