"""One optimizer step, in the order it happens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.parallel.ledger_entries import COUNTS
from llmsuite.parallel.loss_ledger import LossLedger
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.train.guard import Guard, Verdict
from llmsuite.train.loss_scale import LossScale, NoLossScale
from llmsuite.train.parts import StepPart
from llmsuite.train.passes import BatchReader, Passes, run_prepasses


@dataclasses.dataclass(frozen=True)
class StepRules:
    """What surrounds forward, backward and update in every step of a run."""

    guard: Guard = dataclasses.field(default_factory=Guard)
    """Decides what becomes of a step that is not finite, or a spike."""
    loss_scale: LossScale | NoLossScale = dataclasses.field(default_factory=NoLossScale)
    parts: Sequence[StepPart] = ()
    """Take part in each step, in this order on every rank."""
    may_be_empty: bool = False
    """Whether a global batch of weight 0 is skipped: that of a rollout may have nothing to learn from."""

    def check_weight(self, step: int, weight: float) -> None:
        """Raise UserError when the global batch has nothing to learn from, and may not be empty."""
        if weight == 0 and not self.may_be_empty:
            raise UserError(f"step {step}: nothing in its micro-batches is supervised; look at the rows")

    def judge(self, step: int, weight: float, metrics: dict[str, float]) -> Verdict:
        """What becomes of the step; adds "skipped" and "roll_back" to its metrics where it is not accepted.

        Args:
            step: counted from 1.
            weight: of the global batch.
            metrics: of the global batch, with the norm of its gradient.

        Raises:
            NonFiniteLoss, LossSpike: the run has to stop.
            UserError: the batch has nothing to learn from.
        """
        self.check_weight(step, weight)
        if weight == 0:
            metrics["skipped"] = 1.0
            return "skip"
        loss, norm = metrics["loss"], metrics["grad_norm"]
        finite = math.isfinite(loss) and math.isfinite(norm)
        metrics |= self.loss_scale.metrics(finite)
        if not finite and self.loss_scale.back_off():
            return "skip"
        verdict = self.guard.judge(step, loss, norm, self.loss_scale.note)
        if verdict != "accept":
            metrics["skipped"] = 1.0
        if verdict == "roll_back":
            metrics["roll_back"] = 1.0
        return verdict


def train_step(
    step: int,
    micro_batches: Sequence[Any],
    passes: Passes,
    optimizer: Optimizer,
    rules: StepRules,
    votes: Mapping[str, bool],
    is_logged: bool = True,
) -> dict[str, float]:
    """Forward, backward, update; returns the metrics of the global batch.

    Args:
        step: counted from 1.
        micro_batches: this rank's; each is what `objective.collate` takes: its samples.
        passes: of the model, in training mode.
        optimizer: over the model's parameters.
        rules: the guard, the loss scale and further parts. A step that is not accepted updates nothing, and has the
            metric "skipped", and "roll_back" if the run has to go back to a checkpoint.
        votes: what this rank was asked, such as to stop; returned as metrics, the number of ranks that were asked.
        is_logged: whether metrics that decide nothing, and do not travel with some that do, are read from the device.
            They are also read in a step in which a vote was cast.

    Raises:
        NonFiniteLoss, LossSpike: before anything is updated.
    """
    calls.step(step)
    passes.model.step = step
    scale = rules.loss_scale
    ledger, batches = LossLedger(), BatchReader(passes.objective, micro_batches)
    ledger.vote(**votes)
    run_prepasses(passes, batches)
    for part in rules.parts:
        part.begin(batches.all, scale.value)

    forward_backward(passes, batches, optimizer, ledger, scale.value)
    weight, metrics = ledger.reduce()
    metrics["grad_norm"] = optimizer.finish_gradients((weight or 1.0) * scale.value)
    for part in rules.parts:
        part.finish()
        if is_logged or any(metrics[name] for name in votes):
            metrics |= part.metrics()
    metrics["learning_rate"] = optimizer.learning_rate(step)
    metrics["reader_seconds"] = batches.seconds

    # loss and norm are sums over all ranks, so that all of them decide alike
    if rules.judge(step, weight, metrics) != "accept":
        optimizer.drop_gradients()
        for part in rules.parts:
            part.forget()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON holds no others
    optimizer.step(step)
    for part in rules.parts:
        part.update()
    scale.grow()
    return metrics


def forward_backward(
    passes: Passes, batches: BatchReader, optimizer: Optimizer, ledger: LossLedger, scale: float
) -> None:
    """All passes of a step, in the order of the pipeline's schedule. Gradients are those of the sum of the losses:
    nothing is divided before all of it is there."""
    model, loss = passes.model, passes.objective.loss if passes.objective is not None else None
    actions = passes.actions(len(batches))
    last_backward = {action.chunk: action for action in actions if not action.forward}.values()
    for action in actions:
        if not action.forward:
            optimizer.begin_backward(is_last=action in last_backward)
            model.backward(action, scale)
            continue
        batch = passes.batch_of(action, batches.take)
        if batch is not None:
            ledger.count(**{name: batch[entry] for name, entry in COUNTS.items()})
        terms = passes.forward(action, loss, batch, lengths=batch.get("lengths") if batch is not None else None)
        if terms is not None:
            if model.is_last and terms.total.stop_gradient:
                raise UserError(
                    f"step {model.step}: the stage's loss depends on no trained parameter; it has to be computed from "
                    "what the model returns, without detach() or no_grad()"
                )
            ledger.add(terms)
