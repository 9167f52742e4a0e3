"""Predicted times of a run from the reports of its ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmsuite.parallel.timeline import orders
from llmsuite.planning.cost import HARDWARE
from llmsuite.plugins.rehearse.pipeline_times import StageTimes
from llmsuite.plugins.rehearse.predictions import predict
from tests.support.allocated import run_plan

RECIPE = "recipes/llama/sft.json"


def report_of(rank: int, times: StageTimes, tokens: int = 0) -> dict[str, Any]:
    return {
        "rank": rank,
        "times": dataclasses.asdict(times),
        "predicted": {},
        "tokens": tokens,
        "model_flops": tokens * 1e12,
    }


def predicted(reports: list[dict[str, Any]], *words: str) -> None:
    plan = run_plan(RECIPE, "--launch.num_devices=8", *words)
    predict(reports, plan.model, plan.data, plan.parallel, plan.train, HARDWARE["h100"])


def test_the_ranks_of_a_group_share_its_tokens() -> None:
    report = report_of(0, StageTimes([1.0, 2.0], 0.0, 1.0), tokens=4000)
    predicted([report], '--parallel={"tensor_parallel_degree": 2}')
    assert report["predicted"] == {
        "step_seconds": 4.0,
        "bubble": 0.0,
        "tokens_per_second": 500.0,
        "mfu": pytest.approx(500e12 / 989e12),
    }


def test_a_pipeline_is_as_slow_as_its_slowest_ranks() -> None:
    passes = orders("1F1B", 2, 4, 1)
    times = [
        StageTimes([f if a.forward else b for a in actions], 0.0, 0.0)
        for (f, b), actions in zip([(1.0, 2.0), (2.0, 4.0)], passes, strict=True)
    ]
    slow = StageTimes([2 * seconds for seconds in times[1].passes], 0.0, 0.0)
    words = '--parallel={"pipeline_parallel_degree": 2}'
    reports = [report_of(0, times[0], 8000), report_of(4, times[1])]
    predicted(reports, words)
    assert [report["predicted"]["step_seconds"] for report in reports] == [27.0, 27.0]
    reports.append(report_of(5, slow))
    predicted(reports, words)
    assert [report["predicted"]["step_seconds"] for report in reports] == [1 + 48 + 2] * 3


def test_stages_that_are_not_rehearsed_count() -> None:
    passes = orders("1F1B", 4, 8, 1)
    ends = [report_of(rank, StageTimes([1.0] * 16, 0.0, 0.0), 8000) for rank in (0, 6)]
    predicted(ends, '--parallel={"pipeline_parallel_degree": 4}')
    assert len(passes[0]) == 16
    assert ends[0]["predicted"]["step_seconds"] == pytest.approx(22.0)  # (8 + 3) * 2


def test_a_run_with_a_failed_rank_has_no_step() -> None:
    reports = [report_of(0, StageTimes([1.0], 0.0, 0.0), 1), {"rank": 4, "error": {}}]
    predicted(reports, '--parallel={"pipeline_parallel_degree": 2}')
    assert reports[0]["predicted"] == {}
