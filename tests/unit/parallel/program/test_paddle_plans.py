"""Paddle's own plans of static pipelines, which GPUs run in one executor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from paddle.distributed.passes import new_pass

from llmsuite.parallel.program.pipeline import SCHEDULES
from llmsuite.parallel.schedule import Action, Kind, order
from tests.support.schedules import play_streams

STAGES = (2, 3, 4, 8)
MOST_MICRO_BATCHES = 16


def _paddles_plan(kind: Kind, stage: int, stages: int, micro: int, chunks: int) -> list[tuple[str, int]]:
    """The jobs of a stage, each with its micro-batch, as the pass of Paddle makes them."""
    attributes = {"num_micro_batches": micro, "pp_stage": stage, "pp_degree": stages, "vpp_degree": chunks}
    found: Any = new_pass(f"pipeline_scheduler_{SCHEDULES[kind]}", attributes)
    *jobs, update = [(job.type(), job.micro_batch_id()) for job in found._create_job_list()]
    assert update[0] == "optimizer"
    if kind != "FThenB":
        return jobs
    # its two jobs contain the messages
    with_messages = {"forward": ("recv_forward", "forward"), "backward": ("backward", "send_backward")}
    return [(each, number) for job, number in jobs for each in with_messages[job]]


def _pass_by_pass(actions: list[Action]) -> list[tuple[str, int]]:
    """The jobs in the order of `program.jobs`, in which each pass is completed before the next."""
    names = {True: ("recv_forward", "forward"), False: ("backward", "send_backward")}
    return [(job, action.micro_batch) for action in actions for job in names[action.forward]]


@pytest.mark.parametrize("kind", ["1F1B", "FThenB", "interleaved"])
def test_paddles_plans_end_on_streams(kind: Kind) -> None:
    """With as many micro-batches as the rules of step programs allow."""
    shapes = [(stages, micro) for stages in STAGES for micro in range(stages, MOST_MICRO_BATCHES + 1)]
    assert len(shapes) == 51
    for (stages, micro), chunks in itertools.product(shapes, (2, 3, 4) if kind == "interleaved" else (1,)):
        if kind == "interleaved" and micro % stages:
            continue  # refused by a rule
        plans = [_paddles_plan(kind, stage, stages, micro, chunks) for stage in range(stages)]
        play_streams(plans, chunks, one_stream=kind == "1F1B")


def test_jobs_in_the_order_of_passes_would_not_end() -> None:
    """So `program.jobs` is for devices without streams."""
    for stages in STAGES:
        for micro in range(stages, MOST_MICRO_BATCHES + 1):
            plans = [_pass_by_pass(order("1F1B", stage, stages, micro)) for stage in range(stages)]
            with pytest.raises(AssertionError, match="wait for each other for ever"):
                play_streams(plans, 1, one_stream=True)
