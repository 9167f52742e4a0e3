"""One optimizer step of an `EagerEngine`, in the order of execution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from llmsuite.engine.passes import MicroBatchLoader, Passes, run_prepasses
from llmsuite.engine.rules import StepRules, finite_metrics
from llmsuite.launch import calls
from llmsuite.parallel.loss_ledger import LossLedger
from llmsuite.parallel.optimizer import Optimizer


def train_step(
    engine: StepEngine,
    step: int,
    batches: MicroBatchLoader,
    requests: Mapping[str, bool],
    is_logged: bool = True,
) -> dict[str, float]:
    """Run forward, backward and update; return the metrics of the global batch.

    Args:
        engine: an `EagerEngine`, with its model in training mode. A step that its rules do not accept updates nothing,
            and has the metric "skipped", and "roll_back" if the run has to return to a checkpoint.
        step: counted from 1.
        batches: micro-batches of this rank.
        requests: requests to this rank, such as to stop; returned as metrics, the number of ranks with the request.
        is_logged: True where the metrics of callbacks are read from the device. They are also read in a step with a
            request, which may be logged as the last one.

    Raises:
        NonFiniteLoss, LossSpike: before anything is updated.
    """
    optimizer = engine.optimizer
    rules = engine.rules
    scale = rules.loss_scale
    calls.step(step)
    engine.passes.model.step = step
    ledger = LossLedger()
    ledger.add_requests(**requests)
    run_prepasses(engine.passes, batches)
    for callback in rules.callbacks:
        callback.before_passes(batches.all_batches, scale.value)

    engine.forward_backward(batches, ledger, scale.value)
    # one sum over the ranks for the loss, the metrics and the requests
    weight, metrics = ledger.reduce()
    metrics |= ledger.maxima(rules.max_metrics)
    # a global batch whose rollouts are all empty has weight 0, and gradients of 0
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
        return finite_metrics(metrics)
    optimizer.step(step)
    for callback in rules.callbacks:
        callback.after_update()
    scale.grow()
    return metrics


class StepEngine(Protocol):
    """Interface of an engine whose passes and update are separate calls: `EagerEngine`, which runs `train_step`."""

    passes: Passes
    optimizer: Optimizer
    rules: StepRules

    def forward_backward(self, batches: MicroBatchLoader, ledger: LossLedger, scale: float) -> None:
        """Run all passes of a step, see `EagerEngine.forward_backward`."""
