"""One optimizer step, in the order it happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import paddle

from llmsuite.engine import collective
from llmsuite.engine.loss_ledger import LossLedger, LossTerms
from llmsuite.engine.optimizer import Optimizer
from llmsuite.engine.pipeline import PipelineStage
from llmsuite.engine.schedule import Kind, order
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
    micro_batches: Sequence[Sequence[Any]],
    objective: Objective,
    model: PipelineStage,
    optimizer: Optimizer,
    schedule: Kind,
    autocast: Callable[[], AbstractContextManager[Any]],
    votes: Mapping[str, bool] | None = None,
) -> dict[str, float]:
    """Forward, backward, update; returns the metrics of the global batch.

    Args:
        step: counted from 1.
        micro_batches: the samples of each micro-batch of this rank.
        objective: makes batches and losses.
        model: in training mode.
        optimizer: over its parameters.
        schedule: order of the passes where there is a pipeline; without one each micro-batch goes forward and back.
        autocast: makes the precision context of a forward pass.
        votes: what this rank was asked, such as to stop; comes back as metrics, the number of ranks that were.

    Raises:
        NonFiniteLoss: before anything is updated.
    """
    ledger = LossLedger()
    ledger.vote(**(votes or {}))
    reader_seconds = 0.0

    passes: dict[int, tuple[Any, Any]] = {}
    mesh = collective.mesh()
    for action in order(schedule, mesh.coordinate["pp"], mesh.degrees.pp, len(micro_batches)):
        if not action.forward:
            # gradients of the sum: nothing is divided before all of it is there
            model.backward(*passes.pop(action.micro_batch))
            continue
        start = time.perf_counter()
        batch = objective.collate(micro_batches[action.micro_batch])
        ledger.count(tokens=batch["num_tokens"], supervised_tokens=batch["num_supervised"])
        reader_seconds += time.perf_counter() - start

        with autocast():
            terms = objective.loss(model, batch)
        assert not model.is_last or not terms.total.stop_gradient, "the stage's loss hangs on no parameter"
        passes[action.micro_batch] = model.take_pass(), terms.total
        ledger.add(terms)

    weight, metrics = ledger.reduce()
    if weight == 0:
        raise UserError(
            f"step {step}: nothing in its {len(micro_batches)} micro-batches is supervised; look at the rows"
        )
    metrics["grad_norm"] = optimizer.finish_gradients(weight)

    # summed over all ranks, so that all of them stop, or none
    if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
        raise NonFiniteLoss(
            f"step {step}: loss is {metrics['loss']}, gradient norm {metrics['grad_norm']}; nothing was updated. "
            "Lower train.learning_rate, or look at the rows of this step"
        )
    metrics["learning_rate"] = optimizer.learning_rate(step)
    optimizer.step(step)
    metrics["reader_seconds"] = reader_seconds
    return metrics


@paddle.no_grad()
def evaluate(
    micro_batches: Sequence[Sequence[Any]],
    objective: Objective,
    model: Any,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, float]:
    """Metrics over the micro-batches of all ranks; each has at least one. Leaves the model in training mode."""
    ledger = LossLedger()
    model.eval()
    for samples in micro_batches:
        with autocast():
            ledger.add(objective.loss(model, objective.collate(samples)))
    model.train()
    return ledger.reduce()[1]
