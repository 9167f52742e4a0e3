"""The training loop: which samples, one step, what is recorded, when it is saved."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from llmsuite.data.loader import BatchSampler, ReadAhead
from llmsuite.launch import calls
from llmsuite.observe.metrics import Window
from llmsuite.parallel import collective
from llmsuite.parallel.balance import ExpertBalance
from llmsuite.parallel.loss_ledger import LossTerms, Sums
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.quantisation import InputScales
from llmsuite.parallel.schedule import Kind
from llmsuite.specs import PrePassKind
from llmsuite.train.guard import Guard
from llmsuite.train.loss_scale import LossScale
from llmsuite.train.step import Batch, Objective, evaluate, train_step
from llmsuite.train.stop import StopRequest
from llmsuite.train.stragglers import stragglers


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How many, how much, how often."""

    total_steps: int
    global_batch_size: int
    micro_batch_size: int
    """Of evaluation; those of training are the dealer's."""
    num_workers: int
    """Threads that make batches ahead of their use."""
    pipeline: Kind
    """Order of the passes where there is a pipeline."""
    log_steps: int
    eval_steps: int | None
    save_steps: int | None


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What the loop tells the rest of the run."""

    logged: Callable[[int, Mapping[str, float]], None]
    """A step and its metrics."""
    stepped: Callable[[int], None]
    """A step whose metrics are not logged."""
    evaluated: Callable[[int, int, Mapping[str, float]], None]
    """Metrics of an evaluation after (steps done, samples taken)."""
    save: Callable[[int, int], None]
    """Write a checkpoint of (steps done, samples taken)."""
    save_requested: Callable[[], bool]
    """Whether somebody has asked this rank for a checkpoint."""
    finish: Callable[[], None]
    """Wait for checkpoints that are still being written."""
    skipped: Callable[[int, Mapping[str, float]], None]
    """A step that was not learnt from, with its metrics."""
    roll_back: Callable[[int], int]
    """After a bad step: load the last checkpoint; returns its step."""
    peak_memory_bytes: Callable[[], int]
    of_ranks: Callable[[int, Mapping[str, Sequence[float]]], None]
    """With each record of a run of several ranks: a number of every rank."""


class _Positions(Iterator[int]):
    """Positions in the stream of samples where global batches begin; its end may be moved."""

    def __init__(self, first: int, end: int, step: int):
        self._next, self.end, self._step = first, end, step

    def __next__(self) -> int:
        if self._next >= self.end:
            raise StopIteration
        self._next += self._step
        return self._next - self._step


@dataclasses.dataclass(frozen=True)
class _MadeAhead:
    """The objective of micro-batches that threads make batches of."""

    objective: Objective

    def collate(self, samples: Any) -> Batch:
        batch: Batch = samples.result()
        return batch

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        return self.objective.prepass(kind, model, batch)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        return self.objective.loss(model, batch)


def fit(
    first_step: int,
    position: int,
    objective: Objective | None,
    model: PipelineStage,
    optimizer: Optimizer,
    train_samples: Sequence[Any],
    eval_samples: Sequence[Any],
    dealer: BatchSampler,
    schedule: Schedule,
    autocast: Callable[[], AbstractContextManager[Any]],
    hooks: Hooks,
    *,
    scale: LossScale | None = None,
    prepasses: Sequence[PrePassKind] = (),
    balance: ExpertBalance | None = None,
    input_scales: InputScales | None = None,
    guard: Guard | None = None,
) -> int:
    """Train from `first_step` (counted from 1) and stream `position` to the end, or to a signal.

    In the middle of a pipeline there is no objective, and any sequences of the right lengths do for the samples. What
    is looked at in front of each global batch are the `prepasses`. After a step that the `guard` rolls back, training
    goes on from the last checkpoint with the samples behind that step.

    Returns:
        The number of the last step done; below `total_steps` when a signal ended the run early.
    """
    mesh = collective.mesh()
    rank, num_ranks = mesh.data_rank, mesh.degrees.num_data_ranks
    size, global_batch = schedule.micro_batch_size, schedule.global_batch_size
    mine = eval_samples[rank::num_ranks]
    eval_batches = [mine[i : i + size] for i in range(0, len(mine), size)]
    num_own, num_most = len(eval_batches), math.ceil(math.ceil(len(eval_samples) / num_ranks) / size)
    eval_batches += eval_batches[-1:] * (num_most - num_own)
    window = Window(collective.num_ranks())
    model.train()
    step, busy = first_step - 1, 0.0
    positions = _Positions(position, position + (schedule.total_steps - step) * global_batch, global_batch)
    dealt = map(functools.partial(dealer.micro_batches, rank=rank), positions)  # goes on once there are more positions
    training, num_workers = objective, schedule.num_workers if objective is not None else 0
    if objective is not None and num_workers:
        training = _MadeAhead(objective)
    collate = objective.collate if objective is not None else list
    with StopRequest() as stop, ReadAhead(train_samples, dealt, collate, num_workers) as reader:
        while step < schedule.total_steps:
            step += 1
            started, waited = time.perf_counter(), calls.waited()
            samples = next(reader)
            votes = {"stop": stop.signal is not None, "save": hooks.save_requested()}
            metrics = train_step(
                step,
                samples,
                training,
                model,
                optimizer,
                schedule.pipeline,
                autocast,
                votes,
                scale=scale,
                prepasses=prepasses,
                balance=balance,
                input_scales=input_scales,
                guard=guard,
                is_logged=step == schedule.total_steps or step % schedule.log_steps == 0,
            )
            busy += time.perf_counter() - started - (calls.waited() - waited)
            position += global_batch
            stopping = metrics.pop("stop") > 0  # any rank's signal stops all, at the same step
            wanted = metrics.pop("save") > 0
            last = stopping or step == schedule.total_steps
            rolled_back = metrics.pop("roll_back", 0.0) > 0
            if metrics.get("skipped"):
                hooks.skipped(step, metrics)
            if rolled_back:
                kept = hooks.roll_back(step)
                positions.end += (step - kept) * global_batch
                step = kept
                window.reset()
                busy = 0.0
                if stopping:  # the checkpoint is there; resumed, the run comes to the bad step again
                    break
                continue

            window.add(metrics)
            if last or step % schedule.log_steps == 0:
                epoch = position / len(train_samples)
                memory, slow = hooks.peak_memory_bytes(), dict[str, float]()
                if collective.num_ranks() > 1:
                    each = collective.from_all_ranks([busy / window.steps, memory])
                    slow = stragglers(mesh, [seconds for seconds, _ in each])
                    of_ranks = {"busy_seconds": [s for s, _ in each], "peak_memory_bytes": [m for _, m in each]}
                    hooks.of_ranks(step, of_ranks)
                rates = window.rates()
                hooks.logged(step, {"epoch": epoch, **metrics, **rates, "peak_memory_bytes": memory, **slow})
                window.reset()
                busy = 0.0
            else:
                hooks.stepped(step)

            started = time.perf_counter()
            if last or wanted or (schedule.save_steps and step % schedule.save_steps == 0):
                hooks.save(step, position)
            if stopping:
                break
            if eval_batches and (last or (schedule.eval_steps and step % schedule.eval_steps == 0)):
                metrics = evaluate(eval_batches, objective, model, schedule.pipeline, autocast, num_own, prepasses)
                hooks.evaluated(step, position, metrics)
            window.leave_out(time.perf_counter() - started)
        hooks.finish()
    return step
