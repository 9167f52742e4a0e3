"""Predicted times of a run, from the reports of its rehearsed ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.parallel.timeline import orders
from llmsuite.planning.cost import Hardware
from llmsuite.planning.estimate import estimate
from llmsuite.plugins.rehearse.pipeline_times import PipelineTimes, StageTimes, play_stages, with_stand_ins
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan


def predict(
    reports: Sequence[dict[str, Any]],
    model: ModelPlan,
    data: DataPlan,
    parallel: ParallelPlan,
    train: TrainPlan,
    device: Hardware,
) -> None:
    """Add to the `predicted` figures of each report those of the run: the time of a step in which the stages of its
    pipeline wait for each other, and what follows from it.

    Args:
        reports: of ranks, one of the first pipeline stage among them.
        model: of the run.
        data: of the run.
        parallel: of the run.
        train: of the run.
        device: figures of the device.
    """
    played = [report for report in reports if "times" in report]
    if len(played) < len(reports):
        return  # a rank has failed: the run has no step
    degrees = parallel.degrees
    each = degrees.num_ranks // degrees.pp
    slowest: dict[int, StageTimes] = {}
    for report in played:
        stage = report["rank"] // each
        times = StageTimes(**report["times"])
        if stage not in slowest or times.seconds > slowest[stage].seconds:
            slowest[stage] = times
    if degrees.pp == 1:
        found = PipelineTimes(slowest[0].seconds, 0.0)
    else:
        found = _play(slowest, model, data, parallel, train)
    # the ranks of one pipeline and tensor parallel group share their samples
    first = next(report for report in played if report["tokens"])
    shared = degrees.pp * degrees.tp
    for report in played:
        report["predicted"] |= {
            "step_seconds": found.seconds,
            "bubble": found.bubble,
            "mfu": first["model_flops"] / shared / device.flops / found.seconds,
            "tokens_per_second": first["tokens"] / shared / found.seconds,
        }


def _play(
    slowest: dict[int, StageTimes], model: ModelPlan, data: DataPlan, parallel: ParallelPlan, train: TrainPlan
) -> PipelineTimes:
    """Play the stages of a pipeline, where some may be rehearsed only."""
    pp = parallel.degrees.pp
    num_chunks = parallel.num_chunks
    num_micro_batches = len(next(iter(slowest.values())).passes) // (2 * num_chunks)
    passes = orders(parallel.schedule, pp, num_micro_batches, num_chunks)
    costs = [1.0] * (pp * num_chunks)
    if len(slowest) < pp:
        try:
            found = estimate(model, data, parallel, train)
            costs = [cost.forward for cost in found.costs]
        except UserError:  # a family without a shape spec: its parts are taken to be alike
            pass
    return play_stages(with_stand_ins(slowest, passes, costs), passes)
