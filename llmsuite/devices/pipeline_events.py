"""Workaround for the events of Paddle's static pipelines (3.3.1), on devices where nothing records them."""

from __future__ import annotations


def without_pipeline_events() -> None:
    """Let no operation of a static pipeline wait for an event. To be called once per process, after Paddle is imported.

    Jobs of a pipeline wait for events of each other, because messages have streams of their own. Paddle 3.3.1 records
    these events on GPUs only, but looks for them on every device, and ends the step when one is missing. The CPU and
    XPUs run the operations of an executor one after the other, so nothing has to wait.
    """
    from paddle.distributed.passes.pipeline_scheduler_pass.pipeline_pass_base import PipelinePassBase

    PipelinePassBase._add_dependency = lambda self, recorder_op, waiter_op, name: None
