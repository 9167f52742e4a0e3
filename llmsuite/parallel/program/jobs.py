"""Execution of programs of several micro-batches: one job after the other, with the operations of each in a fixed
order.

Paddle 3.3.1 cuts such a program into jobs, among them a forward pass, a backward pass and the update. It prepares each
job separately for every micro-batch, with operations and dependencies of its own: host memory that grows with their
number. Here a job is prepared once for each micro-batch that is in flight at the same time: one without a pipeline, and
n - s with 1F1B on stage s of n.
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

from llmsuite.base.spans import span
from llmsuite.parallel.schedule import Action

_FORWARD = ("recv_forward", "forward")
_BACKWARD = ("backward", "send_backward")
"""The jobs of a pass over a micro-batch, in order. Only pipelines have jobs that receive or send."""


@dataclasses.dataclass(frozen=True)
class JobRun:
    """One run of a job, for one micro-batch."""

    job: str
    micro_batch: int
    slot: int
    """Slot of the tensors between the jobs of a micro-batch, from 0. Micro-batches in flight at the same time have
    different slots."""


class Jobs:
    """The jobs of a program of several micro-batches; `run` executes them for one step."""

    def __init__(self, run: Any, order: Sequence[Action] | None):
        """
        Args:
            run: of `dist.to_static`, with gradients merged over micro-batches or as a pipeline; it is built, and has
                not run yet.
            order: in which this rank computes the micro-batches; None for Paddle's own.
        """
        engine = run._engine
        self._place = engine._place
        plan = engine._job_plan
        *jobs, update = plan.job_list()
        self.runs = assign_slots(order_jobs([(job.type(), job.micro_batch_id()) for job in jobs], order))
        self._first_jobs = {job.type(): job for job in reversed(jobs)}
        self._programs = {kind: plan.ir_program(kind) for kind in (*self._first_jobs, update.type())}
        self._inputs = {kind: _names_of_inputs(program) for kind, program in self._programs.items()}
        self._losses = {kind: _losses(program, engine._loss_names[0]) for kind, program in self._programs.items()}
        self._rate = engine.main_program.lr_scheduler, engine.main_program.lr_name
        self._scope = paddle.static.global_scope()
        self._innermost: dict[int, Any] = {}
        """By slot, the scope of the last job that was prepared there; it contains the tensors of the earlier jobs."""
        self._prepared: dict[tuple[str, int], tuple[Any, Any]] = {}
        """An executor and its scope, by job and slot."""
        self._update, self._update_program = self._prepared_update(update)

    def __len__(self) -> int:
        """Number of prepared jobs."""
        return len(self._prepared)

    @switch_to_static_graph
    def run(self, inputs: Mapping[str, np.ndarray], num_micro_batches: int) -> np.ndarray | None:
        """Execute one step.

        Args:
            inputs: of this rank's program, micro-batches concatenated along the rows.
            num_micro_batches: that the program is built for.

        Returns:
            The outputs of all micro-batches, concatenated; None on ranks without outputs.
        """
        # each input is split alone: inputs of pairs have half as many rows
        parts = {name: np.split(array, num_micro_batches) for name, array in inputs.items()}
        returned: list[Any] = []
        for run in self.runs:
            given = {name: parts[name][run.micro_batch] for name in self._inputs[run.job]}
            with span(run.job):
                returned += self._run(run.job, run.slot, given)
        scheduler, variable = self._rate
        rate = self._scope.find_var(variable).get_tensor()
        rate.set(np.array([scheduler()], "float32"), self._place)
        with _by_priority(), span("update"):
            self._update.run(self._update_program)
        return np.concatenate(returned) if returned else None

    def _run(self, job: str, slot: int, given: Mapping[str, np.ndarray]) -> Sequence[Any]:
        """Run a job for a micro-batch. Returns its outputs, if it has any."""
        is_new = (job, slot) not in self._prepared
        if is_new:
            executor = paddle.static.Executor(self._place)
            executor._set_plan(self._plan(self._first_jobs[job]))
            scope = self._innermost[slot] if slot in self._innermost else self._scope.new_scope()
            self._prepared[job, slot] = executor, scope
        executor, scope = self._prepared[job, slot]
        outputs = executor.run(self._programs[job], feed=dict(given), fetch_list=self._losses[job], scope=scope)
        if is_new:
            self._innermost[slot] = _inner_scope(scope)
        return outputs

    def _prepared_update(self, update: Any) -> tuple[Any, Any]:
        program = self._programs[update.type()]
        given = program.global_block().kwargs().values()
        assert all(value.persistable for value in given), "an update reads a tensor that only lives for a micro-batch"
        for number, operation in enumerate(program.global_block().ops):
            operation.set_scheduling_priority(number)
        executor = paddle.static.Executor(self._place)
        executor._set_plan(self._plan(update))
        return executor, program

    def _plan(self, job: Any) -> Any:
        """A plan of one job."""
        job.set_micro_batch_id(0)
        return core.Plan([job], {job.type(): self._programs[job.type()]})


def order_jobs(jobs: Sequence[tuple[str, int]], order: Sequence[Action] | None) -> Iterator[tuple[str, int]]:
    """The jobs of all micro-batches, each with its micro-batch, in the order of the passes; unchanged where `order` is
    None."""
    if order is None:
        yield from jobs
        return
    kinds = {job for job, _ in jobs}
    assert kinds <= {*_FORWARD, *_BACKWARD}, "a program has other jobs, which no pass runs"
    for action in order:
        for kind in _FORWARD if action.forward else _BACKWARD:
            if kind in kinds:
                yield kind, action.micro_batch


def assign_slots(jobs: Iterable[tuple[str, int]]) -> list[JobRun]:
    """Assign slots to jobs, each with its micro-batch. A slot is reused when all jobs of its micro-batch are done."""
    jobs = list(jobs)
    left = Counter(micro_batch for _, micro_batch in jobs)
    slots: dict[int, int] = {}
    found = []
    for job, micro_batch in jobs:
        if micro_batch not in slots:
            slots[micro_batch] = min(set(range(len(slots) + 1)) - set(slots.values()))
        found.append(JobRun(job, micro_batch, slots[micro_batch]))
        left[micro_batch] -= 1
        if left[micro_batch] == 0:
            del slots[micro_batch]
    return found


def in_order() -> contextlib.AbstractContextManager[None]:
    """While active, the operations of a program run one after the other, in the thread that calls it. Otherwise Paddle
    3.3.1 gives them to threads when they are ready, and on the CPU each thread keeps its freed memory."""
    return _flag("FLAGS_enable_pir_in_executor_trace_run", True)


def _by_priority() -> contextlib.AbstractContextManager[None]:
    """While active, a program that first runs has its operations in the order of their priorities. With the setting of
    `dist.to_static` each operation stores all operations before and after it: memory quadratic in their number. Forward
    and backward passes keep that setting: Paddle 3.3.1 knows no priorities of our kernels, and would recompute
    activations too early.
    """
    return _flag("FLAGS_new_executor_sequential_run", False)


@contextlib.contextmanager
def _flag(name: str, value: bool) -> Iterator[None]:
    """While active, a Paddle flag has this value."""
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
    """The outputs of a job: the loss where it computes one."""
    value = program.get_output_value_by_name(name)
    return [] if paddle.pir.is_fake_value(value) else [value]


def _inner_scope(scope: Any) -> Any:
    """The scope that an executor has made inside its own scope for the variables of its job."""
    (found,) = scope._kids()
    # Paddle 3.3.1 makes Python the owner of the scope too, and it would be freed twice: so this object is never freed
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    return found
