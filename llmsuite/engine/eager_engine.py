"""Engine whose steps run eagerly: forward and backward passes one by one, then the update.

`train_step` is one optimizer step, in the order of execution.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmsuite.base.errors import UserError
from llmsuite.base.spans import span
from llmsuite.contract.schema.engine import EngineSection
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.passes import MicroBatchLoader, Passes
from llmsuite.engine.rules import StepRules
from llmsuite.engine.train_engine import TrainEngine
from llmsuite.parallel.ledger_entries import COUNTS
from llmsuite.parallel.loss_ledger import LossLedger
from llmsuite.parallel.optimizer import Optimizer


def train_step(
    engine: EagerEngine,
    step: int,
    batches: MicroBatchLoader,
    requests: Mapping[str, bool],
    is_logged: bool = True,
) -> dict[str, float]:
    """Run forward, backward and update; return the metrics of the global batch.

    Args:
        engine: has the model, in training mode. A step that its rules do not accept updates nothing,
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
    scale = rules.loss_scale.value
    ledger = engine.begin_step(step, batches, requests)
    rules.before_passes(batches.all_batches)
    engine.forward_backward(batches, ledger, scale)
    # one sum over the ranks for the loss, the metrics and the requests
    weight, metrics = ledger.reduce()
    metrics |= ledger.maxima(rules.max_metrics)
    # a global batch whose rollouts are all empty has weight 0, and gradients of 0
    metrics["grad_norm"] = optimizer.finish_gradients((weight or 1.0) * scale)
    rules.after_passes(metrics, requests, is_logged)
    metrics["learning_rate"] = optimizer.learning_rate(step)
    metrics["reader_seconds"] = batches.seconds

    # loss and norm are reduced over all ranks, so all of them make the same decision
    if rules.decide(step, weight, metrics) != "accept":
        optimizer.drop_gradients()
        return rules.after_skip(metrics)
    optimizer.step(step)
    rules.after_update()
    return metrics


class EagerEngine(TrainEngine):
    """Runs `train_step`. Only layers may be compiled, not the order of the passes and the update."""

    optimizer: Optimizer

    def __init__(self, passes: Passes, optimizer: Optimizer, rules: StepRules):
        super().__init__(passes, optimizer, rules)

    @classmethod
    def from_plans(
        cls,
        passes: Passes,
        rules: StepRules,
        built: BuiltModel,
        train: TrainSection,
        engine: EngineSection,
        backend: DeviceBackend,
        total_steps: int,
    ) -> EagerEngine:
        """Build the engine with its optimizer.

        Args:
            passes: passes of the model.
            rules: rules of the steps.
            built: the model.
            train: section of the recipe with the keys of the optimizer.
            engine: section of the recipe.
            backend: backend of the device.
            total_steps: steps of the run.
        """
        host = backend if engine.offload_optimizer else None
        ops = backend.optimizer_ops(engine.precision)
        optimizer = Optimizer(built.shards, train, total_steps, host, ops, built.shapes, built.is_transposed)
        return cls(passes, optimizer, rules)

    def with_rules(self, rules: StepRules) -> EagerEngine:
        """Return an engine of the same model and optimizer, with other rules."""
        return EagerEngine(self.passes, self.optimizer, rules)

    def step(
        self, step: int, batches: MicroBatchLoader, requests: Mapping[str, bool], is_logged: bool = True
    ) -> dict[str, float]:
        """Run `train_step`."""
        self.optimizer.reserve()
        return train_step(self, step, batches, requests, is_logged)

    def forward_backward(self, batches: MicroBatchLoader, ledger: LossLedger, scale: float) -> None:
        """Run all passes of a step, in the order of the pipeline schedule. The gradients are those of the sum of the
        losses: they are divided by the weight of the global batch once, after the last pass.

        A `ProgramEngine` has no such method: its program has the passes and the update in one, and no gradients lie
        between them that could be looked at, or dropped.

        Args:
            batches: micro-batches of this rank.
            ledger: gets the sums and weights of the losses.
            scale: factor of the losses in the backward passes.
        """
        passes = self.passes
        model = passes.model
        loss = passes.objective.loss if passes.objective is not None else None
        actions = passes.actions(len(batches))
        # of each chunk: its gradients are complete with this pass, and their reduction over the data ranks begins
        last_backward = {action.chunk: action for action in actions if not action.forward}.values()
        for action in actions:
            if not action.forward:
                self.optimizer.begin_backward(is_last=action in last_backward)
                with span("backward"):
                    model.backward(action, scale)
                continue
            batch = passes.batch_of(action, batches.pop)
            if batch is not None:
                ledger.count(**{name: batch[entry] for name, entry in COUNTS.items()})
            lengths = batch.get("lengths") if batch is not None else None
            with span("forward"):
                terms = passes.forward(action, loss, batch, lengths)
            if terms is not None:
                if model.is_last and terms.total.stop_gradient:
                    raise UserError(
                        f"step {model.step}: the stage's loss depends on no trained parameter; it has to be computed "
                        "from what the model returns, without detach() or no_grad()"
                    )
                ledger.add(terms)
