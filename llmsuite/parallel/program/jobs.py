"""How programs run: by one micro-batch after the other, their operations in one order.

Paddle 3.3.1 cuts a program of several micro-batches into a forward, a backward and an optimizer part, and prepares the
first two for each micro-batch by itself, with operations and dependencies of its own: memory that grows with their
number, and is none of tensors. Here both are prepared once, and run as often as there are micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.base import core
from paddle.jit.api import switch_to_static_graph

_UPDATE = "optimize"


def by_micro_batch(run: Any) -> Callable[[], None]:
    """Let each call of a program be the forward and backward pass of one micro-batch. Call it before the program runs.

    Args:
        run: of `dist.to_static`, with gradients merged over micro-batches, and no pipeline.

    Returns:
        What updates the parameters with the gradients of all calls since the last update.
    """
    engine = run._engine
    plan = engine._job_plan
    forward, backward, *_, update = plan.job_list()
    assert (forward.type(), backward.type(), update.type()) == ("forward", "backward", _UPDATE)
    of_update = plan.ir_program(_UPDATE)
    given = of_update.global_block().kwargs().values()
    assert all(value.persistable for value in given), "an update takes what lives as long as a micro-batch"
    engine._executor._set_plan(_plan(plan, forward, backward))
    executor = paddle.static.Executor(engine._place)
    executor._set_plan(_plan(plan, update))
    for place, operation in enumerate(of_update.global_block().ops):
        operation.set_scheduling_priority(place)

    def run_update() -> None:
        with _by_priority():
            executor.run(of_update)

    return switch_to_static_graph(run_update)


def in_order() -> contextlib.AbstractContextManager[None]:
    """While active, the operations of a program run one after the other, in the thread that calls it. By itself Paddle
    3.3.1 gives them to threads as they become ready; on the CPU each of these keeps freed memory to itself."""
    return _flag("FLAGS_enable_pir_in_executor_trace_run", True)


def _by_priority() -> contextlib.AbstractContextManager[None]:
    """While active, a program that is run the first time has its operations in the order of their priorities. As
    `dist.to_static` wants it, each is told all that come before it and all behind it: memory that grows with the square
    of their number. Forward and backward passes stay so: of our kernels Paddle 3.3.1 knows no priorities, and would
    compute what is to be made again at once.
    """
    return _flag("FLAGS_new_executor_sequential_run", False)


@contextlib.contextmanager
def _flag(name: str, value: bool) -> Iterator[None]:
    """While active, a flag of Paddle's has this value."""
    before = paddle.get_flags([name])
    paddle.set_flags({name: value})
    try:
        yield
    finally:
        paddle.set_flags(before)


def _plan(whole: Any, *jobs: Any) -> Any:
    """Some of the jobs of a plan."""
    return core.Plan([*jobs], {job.type(): whole.ir_program(job.type()) for job in jobs})
