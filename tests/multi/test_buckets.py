"""Gradients that travel together, a few at a time or all at once: as in one process, and as planned.

Every other test here has each by itself, as the CPU backend does unless it is asked.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, compare, many_processes, one_process, plan_of, run_cases
from tests.parity.planned import check_truth
from tests.parity.points import Point, point

COMMON = {"stage": "tokens", "optimizer": "sgd", "tied": True, "micro_batch_size": 1}
RUNS: dict[str, tuple[Point, int]] = {
    # whose last bucket has what is left
    "interleaved": (point(pp=2, data_ranks=2, schedule="interleaved", **COMMON), 40_000),
    "stage 2, cut over two of four": (point(data_ranks=4, sharding="stage2", sharding_degree=2, **COMMON), 40_000),
    "stage 3, compiled": (
        point(tp=2, data_ranks=2, sharding="stage3", sequence_parallel=True, mode="to_static", **COMMON),
        20_000,
    ),
    "stage 1, all at once": (point(data_ranks=4, sharding="stage1", sharding_degree=2, **COMMON), 1 << 24),
}


def _case(name: str) -> Case:
    chosen, limit = RUNS[name]
    case = many_processes(chosen)
    words = [*case.words, f"--parallel.gradient_bucket_bytes={limit}"]
    return dataclasses.replace(case, name=name, words=words, trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    one = one_process(RUNS["interleaved"][0])
    assert {one_process(chosen).name for chosen, _ in RUNS.values()} == {one.name}
    assert run_cases(runner, [one, *map(_case, RUNS)]) == {}
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_they_are_the_same_however_they_travel(runs: Runner, name: str) -> None:
    chosen, _ = RUNS[name]
    assert compare(runs, one_process(chosen).name, name).problems == []
    check_truth(runs.directory / name, plan_of(_case(name)))
