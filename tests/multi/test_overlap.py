"""Matrices cut by their outputs that compute while they send: as in one process, and what is sent is what is planned.

Over Gloo a call is over when it returns, so that nothing is overlapped here; the order of the calls, and what is used
when, is that of devices whose calls are not.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from llmsuite.devices.cpu import CpuBackend
from tests.multi.conftest import Runner
from tests.parity.cases import Case, compare, many_processes, one_process, plan_of, run_cases
from tests.parity.planned import check_truth
from tests.parity.points import Point, point

COMMON = {"stage": "tokens", "optimizer": "sgd", "tied": False, "micro_batch_size": 1}
RUNS: dict[str, Point] = {
    "tensor parallel": point(tp=2, data_ranks=1, **COMMON),
    "sequence parallel, stage 3, computed again": point(
        tp=2, data_ranks=2, sharding="stage3", sequence_parallel=True, recompute="full", **COMMON
    ),
    "a pipeline, half of it computed again": point(tp=2, pp=2, recompute="selective", data_ranks=1, **COMMON),
}


def _case(name: str) -> Case:
    return dataclasses.replace(many_processes(RUNS[name]), name=name, beside_passes=True, trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    assert len({one_process(chosen).name for chosen in RUNS.values()}) == 1
    assert run_cases(runner, [one_process(RUNS["tensor parallel"]), *map(_case, RUNS)]) == {}
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_the_same(runs: Runner, name: str) -> None:
    assert compare(runs, one_process(RUNS[name]).name, name).problems == []
    with mock.patch.object(CpuBackend, "sends_beside_passes", True):
        check_truth(runs.directory / name, plan_of(_case(name)))
