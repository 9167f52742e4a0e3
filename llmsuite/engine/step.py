"""One optimizer step, in the order of execution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from llmsuite.base.errors import UserError
from llmsuite.engine.guard import Guard, StepDecision
from llmsuite.engine.loss_scale import LossScale, NoLossScale
from llmsuite.engine.passes import MicroBatchLoader, Passes, run_prepasses
from llmsuite.engine.step_callback import StepCallback
from llmsuite.launch import calls
from llmsuite.parallel.ledger_entries import COUNTS
from llmsuite.parallel.loss_ledger import LossLedger
from llmsuite.parallel.optimizer import Optimizer


@dataclasses.dataclass(frozen=True)
class StepRules:
    """Guard, loss scale and callbacks of every step of a run."""

    guard: Guard = dataclasses.field(default_factory=Guard)
    """Decides whether a step that is not finite, or is a spike, is applied."""
    loss_scale: LossScale | NoLossScale = dataclasses.field(default_factory=NoLossScale)
    callbacks: Sequence[StepCallback] = ()
    """Called in each step, in this order on every rank, as some of their methods are collective operations."""
    max_metrics: Sequence[str] = ()
    """Metrics of the loss that are maxima over all ranks, `StageProfile.max_metrics`."""
    may_be_empty: bool = False
    """True where a global batch of weight 0 is skipped: all rewards of a rollout may be equal."""

    def check_weight(self, step: int, weight: float) -> None:
        """Raise UserError when nothing in the global batch is supervised, and it may not be empty."""
        if weight == 0 and not self.may_be_empty:
            raise UserError(f"step {step}: nothing in its micro-batches is supervised; look at the rows")

    def decide(self, step: int, weight: float, metrics: dict[str, float]) -> StepDecision:
        """Decide whether a step is applied; add "skipped" and "roll_back" to its metrics where it is not accepted.

        Args:
            step: counted from 1.
            weight: loss weight of the global batch.
            metrics: metrics of the global batch, with the norm of its gradient.

        Raises:
            NonFiniteLoss, LossSpike: the run has to stop.
            UserError: nothing in the batch is supervised.
        """
        self.check_weight(step, weight)
        if weight == 0:
            metrics["skipped"] = 1.0
            return "skip"
        loss = metrics["loss"]
        norm = metrics["grad_norm"]
        finite = math.isfinite(loss) and math.isfinite(norm)
        metrics |= self.loss_scale.metrics(finite)
        if not finite and self.loss_scale.back_off():
            return "skip"
        decision = self.guard.decide(step, loss, norm, self.loss_scale.note)
        if decision != "accept":
            metrics["skipped"] = 1.0
        if decision == "roll_back":
            metrics["roll_back"] = 1.0
        return decision


def train_step(
    step: int,
    batches: MicroBatchLoader,
    passes: Passes,
    optimizer: Optimizer,
    rules: StepRules,
    requests: Mapping[str, bool],
    is_logged: bool = True,
) -> dict[str, float]:
    """Run forward, backward and update; return the metrics of the global batch.

    Args:
        step: counted from 1.
        batches: micro-batches of this rank.
        passes: passes of the model, in training mode.
        optimizer: optimizer of the model's parameters.
        rules: guard, loss scale and callbacks. A step that is not accepted updates nothing, and has the metric
            "skipped", and "roll_back" if the run has to return to a checkpoint.
        requests: requests to this rank, such as to stop; returned as metrics, the number of ranks with the request.
        is_logged: True where the metrics of callbacks are read from the device. They are also read in a step with a
            request, which may be logged as the last one.

    Raises:
        NonFiniteLoss, LossSpike: before anything is updated.
    """
    calls.step(step)
    passes.model.step = step
    scale = rules.loss_scale
    ledger = LossLedger()
    ledger.add_requests(**requests)
    run_prepasses(passes, batches)
    for callback in rules.callbacks:
        callback.before_passes(batches.all_batches, scale.value)

    forward_backward(passes, batches, optimizer, ledger, scale.value)
    weight, metrics = ledger.reduce()
    metrics |= ledger.maxima(rules.max_metrics)
    metrics["grad_norm"] = optimizer.finish_gradients((weight or 1.0) * scale.value)
    for callback in rules.callbacks:
        callback.after_passes()
        if is_logged or any(metrics[name] for name in requests):
            metrics |= callback.metrics()
    metrics["learning_rate"] = optimizer.learning_rate(step)
    metrics["reader_seconds"] = batches.seconds

    # loss and norm are reduced over all ranks, so all of them make the same decision
    if rules.decide(step, weight, metrics) != "accept":
        optimizer.drop_gradients()
        for callback in rules.callbacks:
            callback.after_skip()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no NaN or infinity
    optimizer.step(step)
    for callback in rules.callbacks:
        callback.after_update()
    scale.grow()
    return metrics


def forward_backward(
    passes: Passes, batches: MicroBatchLoader, optimizer: Optimizer, ledger: LossLedger, scale: float
) -> None:
    """Run all passes of a step, in the order of the pipeline schedule. The gradients are those of the sum of the
    losses: they are divided by the weight of the global batch once, after the last pass."""
    model = passes.model
    loss = passes.objective.loss if passes.objective is not None else None
    actions = passes.actions(len(batches))
    last_backward = {action.chunk: action for action in actions if not action.forward}.values()
    for action in actions:
        if not action.forward:
            optimizer.begin_backward(is_last=action in last_backward)
            model.backward(action, scale)
            continue
        batch = passes.batch_of(action, batches.pop)
        if batch is not None:
            ledger.count(**{name: batch[entry] for name, entry in COUNTS.items()})
        lengths = batch.get("lengths") if batch is not None else None
        terms = passes.forward(action, loss, batch, lengths)
        if terms is not None:
            if model.is_last and terms.total.stop_gradient:
                raise UserError(
                    f"step {model.step}: the stage's loss depends on no trained parameter; it has to be computed from "
                    "what the model returns, without detach() or no_grad()"
                )
            ledger.add(terms)
