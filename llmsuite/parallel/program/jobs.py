"""How programs of several micro-batches run: a job after the other, the operations of each in one order.

Paddle 3.3.1 cuts such a program into jobs, among them a forward pass, a backward pass and the update, and prepares each
for every micro-batch by itself, with operations and dependencies of its own: memory that grows with their number, and
is none of tensors. Here a job is prepared once for each micro-batch that is held at once: without a pipeline one, and
with 1F1B n - s on stage s of n.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.jit.api import switch_to_static_graph

from llmsuite.parallel.schedule import Action

_FORWARD, _BACKWARD = ("recv_forward", "forward"), ("backward", "send_backward")
"""The jobs of a pass over a micro-batch, in order. Only in a pipeline there are some that receive or send."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A job of one micro-batch."""

    job: str
    micro_batch: int
    place: int
    """What it has between its jobs lies there: micro-batches that are held at once have different ones, from 0."""


class Jobs:
    """The jobs of a program of several micro-batches, which `run` runs for one step."""

    def __init__(self, run: Any, order: Sequence[Action] | None):
        """
        Args:
            run: of `dist.to_static`, with gradients merged over micro-batches or as a pipeline; it is made, and has not
                run.
            order: in which this rank computes the micro-batches; None for Paddle's own.
        """
        engine = run._engine
        self._place, plan = engine._place, engine._job_plan
        *jobs, update = plan.job_list()
        self.turns = turns(ordered([(job.type(), job.micro_batch_id()) for job in jobs], order))
        self._first_jobs = {job.type(): job for job in reversed(jobs)}
        self._programs = {kind: plan.ir_program(kind) for kind in (*self._first_jobs, update.type())}
        self._inputs = {kind: _names_of_inputs(program) for kind, program in self._programs.items()}
        self._losses = {kind: _losses(program, engine._loss_names[0]) for kind, program in self._programs.items()}
        self._rate = engine.main_program.lr_scheduler, engine.main_program.lr_name
        self._scope = paddle.static.global_scope()
        self._innermost: dict[int, Any] = {}
        """By place, the scope of the last job that was prepared there; it finds what the earlier ones have made."""
        self._prepared: dict[tuple[str, int], tuple[Any, Any]] = {}
        """An executor and its scope, by job and place."""
        self._update, self._update_program = self._prepared_update(update)

    def __len__(self) -> int:
        """How many jobs are prepared."""
        return len(self._prepared)

    @switch_to_static_graph
    def run(self, inputs: Mapping[str, np.ndarray], num_micro_batches: int) -> np.ndarray | None:
        """Do one step.

        Args:
            inputs: of this rank's program, one micro-batch behind the other, rows first.
            num_micro_batches: as the program is made for.

        Returns:
            What the program tells of all micro-batches, one behind the other; None on ranks that it tells nothing.
        """
        # by itself each: of pairs there are half as many as rows
        parts = {name: np.split(array, num_micro_batches) for name, array in inputs.items()}
        returned: list[Any] = []
        for turn in self.turns:
            given = {name: parts[name][turn.micro_batch] for name in self._inputs[turn.job]}
            returned += self._run(turn.job, turn.place, given)
        scheduler, variable = self._rate
        rate = self._scope.find_var(variable).get_tensor()
        rate.set(np.array([scheduler()], "float32"), self._place)
        with _by_priority():
            self._update.run(self._update_program)
        return np.concatenate(returned) if returned else None

    def _run(self, job: str, place: int, given: Mapping[str, np.ndarray]) -> Sequence[Any]:
        """Run a job of a micro-batch. Returns what it tells, if it tells anything."""
        is_new = (job, place) not in self._prepared
        if is_new:
            executor = paddle.static.Executor(self._place)
            executor._set_plan(self._plan(self._first_jobs[job]))
            scope = self._innermost[place] if place in self._innermost else self._scope.new_scope()
            self._prepared[job, place] = executor, scope
        executor, scope = self._prepared[job, place]
        told = executor.run(self._programs[job], feed=dict(given), fetch_list=self._losses[job], scope=scope)
        if is_new:
            self._innermost[place] = _inside(scope)
        return told

    def _prepared_update(self, update: Any) -> tuple[Any, Any]:
        program = self._programs[update.type()]
        given = program.global_block().kwargs().values()
        assert all(value.persistable for value in given), "an update takes what lives as long as a micro-batch"
        for number, operation in enumerate(program.global_block().ops):
            operation.set_scheduling_priority(number)
        executor = paddle.static.Executor(self._place)
        executor._set_plan(self._plan(update))
        return executor, program

    def _plan(self, job: Any) -> Any:
        """A job as all of a plan."""
        job.set_micro_batch_id(0)
        return core.Plan([job], {job.type(): self._programs[job.type()]})


def ordered(jobs: Sequence[tuple[str, int]], order: Sequence[Action] | None) -> Iterator[tuple[str, int]]:
    """The jobs of all micro-batches, each with its micro-batch, in an order of passes, or as they stand where that is
    None."""
    if order is None:
        yield from jobs
        return
    kinds = {job for job, _ in jobs}
    assert kinds <= {*_FORWARD, *_BACKWARD}, "a program has other jobs, which no pass would run"
    for action in order:
        for kind in _FORWARD if action.forward else _BACKWARD:
            if kind in kinds:
                yield kind, action.micro_batch


def turns(jobs: Iterable[tuple[str, int]]) -> list[Turn]:
    """Jobs, each with its micro-batch, with places that are taken again once all jobs of a micro-batch are done."""
    jobs = list(jobs)
    left = Counter(micro_batch for _, micro_batch in jobs)
    places: dict[int, int] = {}
    found = []
    for job, micro_batch in jobs:
        if micro_batch not in places:
            places[micro_batch] = min(set(range(len(places) + 1)) - set(places.values()))
        found.append(Turn(job, micro_batch, places[micro_batch]))
        left[micro_batch] -= 1
        if left[micro_batch] == 0:
            del places[micro_batch]
    return found


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


def _names_of_inputs(program: Any) -> list[str]:
    """The inputs that a job reads first; later ones find them in the scope."""
    data = (operation for operation in program.global_block().ops if operation.name() == "pd_op.data")
    return [operation.attrs()["name"] for operation in data if not operation.result(0).persistable]


def _losses(program: Any, name: str) -> list[Any]:
    """What a job tells: the loss where it makes one."""
    value = program.get_output_value_by_name(name)
    return [] if paddle.pir.is_fake_value(value) else [value]


def _inside(scope: Any) -> Any:
    """The scope that an executor has made inside of its own for the variables of its job."""
    (found,) = scope._kids()
    # Paddle 3.3.1 gives Python the scope as its own, and it would be freed twice: so this object stays for ever
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    return found
