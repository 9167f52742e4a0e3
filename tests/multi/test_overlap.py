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

ROUNDING_ALONE = "self_attn.k_proj.bias"
"""It moves every score of a query alike, so its gradient is zero, but for rounding."""
APART = "--parallel.fuse_projections=false"
"""`tests/multi/test_fused_projections.py` has the others, which are the default of devices that send beside passes."""
FAMILIES = ("llama", "gpt")
"""Pretrained on all tokens of their rows: the head's gradient comes to where the sequence was gathered, whole."""


def _pretrained(family: str, is_one: bool) -> Case:
    chosen = point(tp=2, sequence_parallel=True, data_ranks=1, **{**COMMON, "micro_batch_size": 2})
    case = one_process(chosen) if is_one else many_processes(chosen)
    sgd = ("--train.weight_decay=0", "--train.adam_beta2=0.999", "--train.min_lr_ratio=0")
    name = f"{family}, all tokens, {'one process' if is_one else 'cut sequences'}"
    recipe = f"recipes/{family}/pretrain.json"
    return dataclasses.replace(
        case, name=name, words=[*case.words, *sgd, APART], recipe=recipe, overlaps=True, trace=not is_one
    )


def _case(name: str) -> Case:
    case = many_processes(RUNS[name])
    return dataclasses.replace(case, name=name, words=[*case.words, APART], overlaps=True, trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    assert len({one_process(chosen).name for chosen in RUNS.values()}) == 1
    assert run_cases(runner, [one_process(RUNS["tensor parallel"]), *map(_case, RUNS)]) == {}
    assert run_cases(runner, [_pretrained(family, is_one) for family in FAMILIES for is_one in (True, False)]) == {}
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_the_same(runs: Runner, name: str) -> None:
    assert compare(runs, one_process(RUNS[name]).name, name).problems == []
    with mock.patch.object(CpuBackend, "overlaps_communication", True):
        check_truth(runs.directory / name, plan_of(_case(name)))


@pytest.mark.parametrize("family", FAMILIES)
def test_of_all_tokens_the_numbers_are_the_same(runs: Runner, family: str) -> None:
    one, many = (_pretrained(family, is_one) for is_one in (True, False))
    problems = compare(runs, one.name, many.name).problems
    assert [problem for problem in problems if ROUNDING_ALONE not in problem] == []
    with mock.patch.object(CpuBackend, "overlaps_communication", True):
        check_truth(runs.directory / many.name, plan_of(many))
