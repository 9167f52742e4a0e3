"""Multi-token prediction trains as in one process on every mesh, with adapters too; what is sent and kept is as
planned; checkpoints are of no mesh, and are written as the published weights are."""

from __future__ import annotations

import shutil

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import plan_of, run_cases
from tests.parity.planned import check_truth
from tests.support.mtp_cases import MESHES, case_of, check_equal

ONES = [f"one {kind}" for kind in dict.fromkeys(kind for kind, *_ in MESHES.values())]
CONTINUED = {"ep2 stage1, again": "interleaved"}
"""A checkpoint of the one, and what goes on from it."""


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ended = run_cases(runner, [case_of(name, name) for name in (*ONES, *MESHES)])
    cases = []
    for source, target in CONTINUED.items():
        if source not in ended:
            name = f"{source} then {target}"
            step = "checkpoints/step-1"
            shutil.copytree(runner.directory / source / step, runner.directory / name / step)
            cases.append(case_of(name, target, resume=True))
    return ended | run_cases(runner, cases)


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_to_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    kind = MESHES[mesh][0]
    one = f"one {kind}"
    for name in (one, mesh):
        assert name not in failed, failed[name]
    check_equal(runner, one, mesh, kind)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_is_as_planned(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    assert mesh not in failed, failed[mesh]
    found = check_truth(runner.directory / mesh, plan_of(case_of(mesh, mesh)))
    assert abs(found.memory["between_steps"]) <= 0.01
    assert abs(found.memory["gradients"]) <= 0.01


@pytest.mark.parametrize("source", CONTINUED)
def test_a_checkpoint_is_continued_on_another_mesh(runner: Runner, failed: dict[str, str], source: str) -> None:
    name = f"{source} then {CONTINUED[source]}"
    assert name not in failed, failed[name]
    whole = runner.metrics("one sft")[1:]
    found = runner.metrics(name)
    assert [record["step"] for record in found] == [record["step"] for record in whole] == [2, 3]
    for a, b in zip(whole, found):
        for key in ("loss", "grad_norm", "mtp_loss"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
