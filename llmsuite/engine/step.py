"""One optimizer step, in the order it happens."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import paddle

from llmsuite.engine import collective
from llmsuite.engine.loss_ledger import LossLedger, LossTerms
from llmsuite.engine.loss_scale import LossScale
from llmsuite.engine.optimizer import Optimizer
from llmsuite.engine.pipeline import PipelineStage
from llmsuite.engine.schedule import Action, Kind, order
from llmsuite.errors import UserError

Batch = dict[str, Any]


class Objective(Protocol):
    """What the engine needs of a stage."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples to arrays. Has the integers "num_tokens" (without padding) and "num_supervised"."""

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Forward pass of one micro-batch."""


class NonFiniteLoss(UserError):
    """The loss or the gradient is infinite or not a number; the parameters are as they were before the step."""


def train_step(
    step: int,
    micro_batches: Sequence[Any],
    objective: Objective | None,
    model: PipelineStage,
    optimizer: Optimizer,
    schedule: Kind,
    autocast: Callable[[], AbstractContextManager[Any]],
    votes: Mapping[str, bool] | None = None,
    scale: LossScale | None = None,
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

    Raises:
        NonFiniteLoss: before anything is updated.
    """
    ledger = LossLedger()
    ledger.vote(**(votes or {}))
    reader_seconds = 0.0

    for action in _order(schedule, model, len(micro_batches)):
        if not action.forward:
            # gradients of the sum: nothing is divided before all of it is there
            model.backward(action, 1.0 if scale is None else scale.value)
            continue
        loss = None
        if model.meets_data(action.chunk):
            assert objective is not None
            start = time.perf_counter()
            batch = objective.collate(micro_batches[action.micro_batch])
            ledger.count(tokens=batch["num_tokens"], supervised_tokens=batch["num_supervised"])
            reader_seconds += time.perf_counter() - start
            loss = functools.partial(objective.loss, model, batch)

        with autocast():
            terms = model.forward(action, loss)
        if terms is not None:
            assert not model.is_last or not terms.total.stop_gradient, "the stage's loss hangs on no parameter"
            ledger.add(terms)

    weight, metrics = ledger.reduce()
    if weight == 0:
        raise UserError(
            f"step {step}: nothing in its {len(micro_batches)} micro-batches is supervised; look at the rows"
        )
    metrics["grad_norm"] = optimizer.finish_gradients(weight * (1.0 if scale is None else scale.value))
    metrics["learning_rate"] = optimizer.learning_rate(step)
    metrics["reader_seconds"] = reader_seconds

    # summed over all ranks, so that all of them stop, or none
    finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
    if scale is not None:
        metrics |= {"loss_scale": scale.value, "skipped": 0.0 if finite else 1.0}
    if finite:
        optimizer.step(step)
        if scale is not None:
            scale.grow()
        return metrics
    if scale is not None and scale.back_off():
        optimizer.drop_gradients()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
    lowest = "" if scale is None else f" The loss scale is at its lowest, {scale.value:.0e}."
    raise NonFiniteLoss(
        f"step {step}: loss is {metrics['loss']}, gradient norm {metrics['grad_norm']}; nothing was updated.{lowest} "
        "Lower train.learning_rate, or look at the rows of this step"
    )


@paddle.no_grad()
def evaluate(
    micro_batches: Sequence[Sequence[Any]],
    objective: Objective | None,
    model: PipelineStage,
    schedule: Kind,
    autocast: Callable[[], AbstractContextManager[Any]],
    num_counted: int | None = None,
) -> dict[str, float]:
    """Metrics over the micro-batches of all ranks. Leaves the model in training mode.

    Args:
        micro_batches: as many on every rank, as sharding stage 3 gathers parameters for each.
        objective: makes batches and losses; None in the middle of a pipeline.
        model: of any mode.
        schedule: order of the passes where there is a pipeline.
        autocast: makes the precision context of a forward pass.
        num_counted: micro-batches that count, at least one; those behind are there for the other ranks. None for all.
    """
    ledger = LossLedger()
    model.eval()
    for action in _order(schedule, model, len(micro_batches)):
        if not action.forward:
            continue
        loss = None
        if model.meets_data(action.chunk):
            assert objective is not None
            loss = functools.partial(objective.loss, model, objective.collate(micro_batches[action.micro_batch]))
        with autocast():
            terms = model.forward(action, loss)
        if terms is not None and (num_counted is None or action.micro_batch < num_counted):
            ledger.add(terms)
    model.train()
    return ledger.reduce()[1]


def _order(schedule: Kind, model: PipelineStage, num_micro_batches: int) -> list[Action]:
    mesh = collective.mesh()
    return order(schedule, mesh.coordinate["pp"], mesh.degrees.pp, num_micro_batches, len(model.chunks))
