"""One optimizer step, in the order it happens."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import paddle

from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.parallel import collective
from llmsuite.parallel.balance import ExpertBalance
from llmsuite.parallel.loss_ledger import LossLedger, LossTerms, Sums
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.quantisation import InputScales
from llmsuite.parallel.schedule import Action, Kind, order
from llmsuite.specs import PrePassKind
from llmsuite.train.guard import Guard
from llmsuite.train.loss_scale import LossScale

Batch = dict[str, Any]


class Objective(Protocol):
    """What the engine needs of a stage."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples to arrays. Has the integers "num_tokens" (without padding) and "num_supervised"; may have "lengths",
        what of each row is no padding, [B], and "weight", that of the loss."""

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """What the loss has to know of the global batch, of one micro-batch. Called when there are prepasses."""

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Forward pass of one micro-batch. After pre-passes `batch["prepass_stats"]` has their sums over weights."""


def train_step(
    step: int,
    micro_batches: Sequence[Any],
    objective: Objective | None,
    model: PipelineStage,
    optimizer: Optimizer,
    schedule: Kind,
    autocast: Callable[[], AbstractContextManager[Any]],
    votes: Mapping[str, bool] | None = None,
    *,
    scale: LossScale | None = None,
    prepasses: Sequence[PrePassKind] = (),
    balance: ExpertBalance | None = None,
    input_scales: InputScales | None = None,
    guard: Guard | None = None,
    is_logged: bool = True,
) -> dict[str, float]:
    """Forward, backward, update; returns the metrics of the global batch.

    Args:
        step: counted from 1.
        micro_batches: of this rank; each is what `objective.collate` takes: its samples.
        objective: makes batches and losses; None in the middle of a pipeline, where nobody looks at the samples.
        model: in training mode.
        optimizer: over its parameters.
        schedule: order of the passes where there is a pipeline; without one each micro-batch goes forward and back.
        autocast: makes the precision context of a forward pass.
        votes: what this rank was asked, such as to stop; comes back as metrics, the number of ranks that were.
        scale: of the loss, for fp16; a step that is not finite is then skipped, and the scale lowered. The metrics
            have "loss_scale", and "skipped": 1 or 0; those that are not finite are left out.
        prepasses: at the global batch before its loss, in this order; the same on every rank.
        balance: of the experts, where the model has some.
        input_scales: of layers whose inputs are rounded.
        guard: decides what becomes of a step that is not finite, or a spike. One that is not learnt from has the
            metric "skipped", and "roll_back" if the run has to go back to a checkpoint. None stops the run.
        is_logged: whether anybody will look at the metrics. Those that decide nothing, and do not come along with some
            that do, are read from the device in such a step only, and in one in which a vote was cast.

    Raises:
        NonFiniteLoss, LossSpike: before anything is updated.
    """
    calls.step(step)
    ledger = LossLedger()
    ledger.vote(**(votes or {}))
    reader = Reader(objective, micro_batches)
    prepass(prepasses, reader, model, schedule, autocast)
    if balance is not None:
        balance.begin(reader.all, 1.0 if scale is None else scale.value)

    actions = _order(schedule, model, len(micro_batches))
    last_backward = {action.chunk: action for action in actions if not action.forward}.values()
    for action in actions:
        if not action.forward:
            optimizer.begin_backward(is_last=action in last_backward)
            # gradients of the sum: nothing is divided before all of it is there
            model.backward(action, 1.0 if scale is None else scale.value)
            continue
        loss = lengths = None
        if model.owns_loss_or_inputs(action.chunk):
            assert objective is not None
            batch = reader.take(action.micro_batch)
            ledger.count(tokens=batch["num_tokens"], supervised_tokens=batch["num_supervised"])
            loss, lengths = functools.partial(objective.loss, model, batch), batch.get("lengths")

        with autocast():
            terms = model.forward(action, loss, lengths)
        if terms is not None:
            assert not model.is_last or not terms.total.stop_gradient, "the stage's loss hangs on no parameter"
            ledger.add(terms)

    weight, metrics = ledger.reduce()
    if weight == 0:
        raise UserError(
            f"step {step}: nothing in its {len(micro_batches)} micro-batches is supervised; look at the rows"
        )
    metrics["grad_norm"] = optimizer.finish_gradients(weight * (1.0 if scale is None else scale.value))
    if balance is not None:
        balance.finish()
        if is_logged or any(metrics[name] for name in votes or ()):
            metrics |= balance.metrics()
    metrics["learning_rate"] = optimizer.learning_rate(step)
    metrics["reader_seconds"] = reader.seconds

    # summed over all ranks, so that all of them decide alike
    finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
    if scale is not None:
        metrics |= {"loss_scale": scale.value, "skipped": 0.0 if finite else 1.0}
    if scale is not None and not finite and scale.back_off():
        return _skipped(optimizer, input_scales, metrics)
    lowest = "" if scale is None else f" The loss scale is at its lowest, {scale.value:.0e}."
    answer = (guard or Guard()).judge(step, metrics["loss"], metrics["grad_norm"], lowest)
    if answer != "learn":
        bad = {"skipped": 1.0, "roll_back": 1.0} if answer == "roll_back" else {"skipped": 1.0}
        return _skipped(optimizer, input_scales, {**metrics, **bad})
    optimizer.step(step)
    if balance is not None:
        balance.update()
    if input_scales is not None:
        input_scales.update()
    if scale is not None:
        scale.grow()
    return metrics


def _skipped(optimizer: Optimizer, input_scales: InputScales | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """Forget what the step has gathered; metrics that JSON can hold."""
    optimizer.drop_gradients()
    if input_scales is not None:
        input_scales.forget()
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


@paddle.no_grad()
def evaluate(
    micro_batches: Sequence[Sequence[Any]],
    objective: Objective | None,
    model: PipelineStage,
    schedule: Kind,
    autocast: Callable[[], AbstractContextManager[Any]],
    num_counted: int | None = None,
    prepasses: Sequence[PrePassKind] = (),
) -> dict[str, float]:
    """Metrics over the micro-batches of all ranks. Leaves the model in training mode.

    Args:
        micro_batches: as many on every rank, as sharding stage 3 gathers parameters for each.
        objective: makes batches and losses; None in the middle of a pipeline.
        model: of any mode.
        schedule: order of the passes where there is a pipeline.
        autocast: makes the precision context of a forward pass.
        num_counted: micro-batches that count, at least one; those behind are there for the other ranks. None for all.
        prepasses: as in `train_step`; what is evaluated takes the place of the global batch.
    """
    ledger = LossLedger()
    reader = Reader(objective, micro_batches)
    prepass(prepasses, reader, model, schedule, autocast, num_counted)
    model.eval()
    for action in _order(schedule, model, len(micro_batches)):
        if not action.forward:
            continue
        loss = None
        if model.owns_loss_or_inputs(action.chunk):
            assert objective is not None
            loss = functools.partial(objective.loss, model, reader.take(action.micro_batch))
        with autocast():
            terms = model.forward(action, loss)
        if terms is not None and (num_counted is None or action.micro_batch < num_counted):
            ledger.add(terms)
    model.train()
    return ledger.reduce()[1]


class Reader:
    """Makes the batch of each micro-batch, once, and takes the time."""

    def __init__(self, objective: Objective | None, micro_batches: Sequence[Sequence[Any]]):
        """`objective` makes the batches; None where nobody reads."""
        self.objective, self._samples = objective, micro_batches
        self._batches: dict[int, Batch] = {}
        self.ahead: Mapping[str, float] | None = None
        """What the pre-passes gave; every batch that is taken has it."""
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def at(self, number: int) -> Batch:
        """The batch of a micro-batch, which is kept until it is taken."""
        if number not in self._batches:
            assert self.objective is not None
            start = time.perf_counter()
            self._batches[number] = self.objective.collate(self._samples[number])
            self.seconds += time.perf_counter() - start
        return self._batches[number]

    def all(self) -> list[Batch]:
        """The batches of all micro-batches; none where nobody reads."""
        return [] if self.objective is None else [self.at(number) for number in range(len(self))]

    def take(self, number: int) -> Batch:
        """The same for the last time."""
        batch = self.at(number)
        del self._batches[number]
        return batch if self.ahead is None else {**batch, "prepass_stats": self.ahead}


@paddle.no_grad()
def prepass(
    prepasses: Sequence[PrePassKind],
    reader: Reader,
    model: PipelineStage,
    schedule: Kind,
    autocast: Callable[[], AbstractContextManager[Any]],
    num_counted: int | None = None,
) -> None:
    """Ask the objective about each micro-batch, add up over micro-batches and ranks, divide, and tell the reader.

    A loss that depends on the whole global batch, such as one with two terms that have weights of their own, is the
    same however the batch is cut, when what it depends on is known before its first micro-batch.

    Args:
        prepasses: what is looked at.
        reader: of the global batch.
        model: of any mode; as many passes on every rank. Left in training mode if there were some.
        schedule: order of the passes where there is a pipeline.
        autocast: makes the precision context of a pass.
        num_counted: as in `evaluate`.
    """
    if not prepasses:
        return
    ledger, objective = LossLedger(), reader.objective
    counted = range(len(reader) if num_counted is None else num_counted)
    for kind in prepasses:
        if kind == "batch":
            for number in counted if objective is not None else ():
                assert objective is not None
                ledger.book(objective.prepass(kind, model, reader.at(number)))
            continue
        model.eval()
        with model.adapters_off() if kind == "adapters_off" else contextlib.nullcontext():
            for action in _order(schedule, model, len(reader)):
                if not action.forward:
                    continue
                ask = None
                if model.owns_loss_or_inputs(action.chunk):
                    assert objective is not None
                    ask = functools.partial(objective.prepass, kind, model, reader.at(action.micro_batch))
                with autocast():
                    sums = model.forward(action, ask)
                if sums is not None and action.micro_batch in counted:
                    ledger.book(sums)
        model.train()
    if objective is not None:
        reader.ahead = ledger.ratios()


def _order(schedule: Kind, model: PipelineStage, num_micro_batches: int) -> list[Action]:
    mesh = collective.mesh()
    return order(schedule, mesh.coordinate["pp"], mesh.degrees.pp, num_micro_batches, len(model.chunks))
