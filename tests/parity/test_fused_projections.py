"""Projections of one input that share an operation, on further meshes than `tests/multi/test_fused_projections.py`: the
numbers are those of one process, what is sent is what is planned, and checkpoints are those of projections apart."""

from __future__ import annotations

import dataclasses
import shutil
from unittest import mock

import pytest

from llmsuite.devices.cpu import CpuBackend
from tests.multi.conftest import Runner
from tests.parity.cases import STEPS, Case, compare, many_processes, one_process, plan_of, run_cases
from tests.parity.planned import check_truth
from tests.parity.points import Point, point

FUSED = "--parallel.fuse_projections=true"
TOKENS = {"stage": "tokens", "optimizer": "sgd", "tied": False, "micro_batch_size": 1}
RUNS: dict[str, tuple[Point, bool]] = {
    "tensor parallel, beside": (point(tp=2, **TOKENS), True),
    "sequence parallel": (point(tp=2, sequence_parallel=True, **TOKENS), False),
    "sequence parallel, stage 3, computed again": (
        point(tp=2, data_ranks=2, sharding="stage3", sequence_parallel=True, recompute="full", **TOKENS),
        True,
    ),
    "stage 3, beside": (point(tp=2, data_ranks=2, sharding="stage3", recompute="selective", **TOKENS), True),
    "preferences, pipeline, stage 2": (
        point(tp=2, pp=2, data_ranks=2, sharding="stage2", optimizer="adamw", tied=True, stage="dpo"),
        False,
    ),
}
"""Strategy, and whether the device sends beside passes."""


def _case(name: str) -> Case:
    chosen, beside = RUNS[name]
    case = many_processes(chosen)
    return dataclasses.replace(case, name=name, words=[*case.words, FUSED], overlaps=beside, trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    ones = {case.name: case for case in (one_process(chosen) for chosen, _ in RUNS.values())}
    assert run_cases(runner, [*ones.values(), *map(_case, RUNS)]) == {}
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_one_process(runs: Runner, name: str) -> None:
    chosen, beside = RUNS[name]
    assert compare(runs, one_process(chosen).name, name).problems == []
    with mock.patch.object(CpuBackend, "overlaps_communication", beside):
        check_truth(runs.directory / name, plan_of(_case(name)))


@pytest.mark.parametrize("begins_fused", [True, False])
def test_a_run_goes_on_in_the_other_way(runs: Runner, begins_fused: bool) -> None:
    chosen = point(tp=2, **TOKENS)
    begun = many_processes(chosen)
    words = [word for word in begun.words if not word.startswith("--checkpoint.")]
    words += ["--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}"]
    first = dataclasses.replace(begun, name=f"begun {begins_fused}", words=[*words, *([FUSED] * begins_fused)])
    then = dataclasses.replace(
        begun, name=f"gone on {begins_fused}", words=[*words, *([] if begins_fused else [FUSED])], resume=True
    )
    assert run_cases(runs, [first]) == {}
    checkpoint = runs.directory / first.name / "checkpoints" / "step-1"
    shutil.copytree(checkpoint, runs.directory / then.name / "checkpoints" / "step-1")
    assert run_cases(runs, [then]) == {}
    expected = runs.metrics(one_process(chosen).name)[1:]
    found = runs.metrics(then.name)
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for a, b in zip(expected, found):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-6)
