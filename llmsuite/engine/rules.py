"""Rules of the steps of a run: which are applied, with which loss scale, and who is called in between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.train_state import TrainState
from llmsuite.engine.batch import Batch
from llmsuite.engine.guard import Guard, StepDecision


class StepCallback:
    """Base class of callbacks: every rank calls the methods in each step, in this order. Override those you need."""

    def before_passes(self, batches: Callable[[], Sequence[Batch]], scale: float) -> None:
        """Called before the forward and backward passes.

        Args:
            batches: returns the batches of this rank's micro-batches; none on middle stages of a pipeline.
            scale: loss scale, a factor of all gradients of the step.
        """

    def after_passes(self) -> None:
        """Called before the update, to reduce over the ranks what this rank has collected. Eager passes are done by
        then; a step program has the passes and the update in one, and runs after this call."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the global batch, after `after_passes`. Called for steps that are logged only, as it waits
        for the device."""
        return {}

    def after_update(self) -> None:
        """Called after the optimizer step."""

    def after_skip(self) -> None:
        """Called instead of `after_update`, in a step that updates nothing."""


GROWTH_STEPS = 2000
LOWEST = 2.0**-14


@dataclasses.dataclass
class LossScale:
    """Factor of the loss before the backward pass; the gradients are divided by it afterwards.

    In fp16 gradients would otherwise vanish below 6e-8 or overflow above 65504 (Micikevicius et al. 2018, arXiv
    1710.03740, section 3.2).
    """

    value: float = 2.0**10
    """Current factor. The engine differentiates a sum over the micro-batch, not a mean: so it starts lower than the
    usual 65536, and it may get below 1."""
    good_steps: int = 0
    """Number of steps with finite gradients since the value changed."""

    @property
    def note(self) -> str:
        """Text to add to the message when a step is not finite and the scale cannot get lower."""
        return f" The loss scale is at its lowest, {self.value:.0e}."

    def metrics(self, finite: bool) -> dict[str, float]:
        """Return the metrics of a step; `finite` is False where its gradients were not finite."""
        return {"loss_scale": self.value, "skipped": 0.0 if finite else 1.0}

    def state(self) -> dict[str, Any]:
        """Return the fields of a checkpoint's `TrainState`."""
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load(self, state: TrainState) -> None:
        """Restore the scale of a checkpoint, if it has one."""
        if state.loss_scale is not None:
            self.value = state.loss_scale
            self.good_steps = state.good_steps

    def grow(self) -> None:
        """Count a step with finite gradients: every 2,000 of them double the value."""
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value = 2 * self.value
            self.good_steps = 0

    def back_off(self) -> bool:
        """Halve the value after a step that has to be skipped. Returns False when it cannot get lower."""
        if self.value <= LOWEST:
            return False
        self.value = self.value / 2
        self.good_steps = 0
        return True


class NoLossScale:
    """Loss scale of 1, for precisions whose gradients neither vanish nor overflow."""

    value = 1.0
    note = ""

    def metrics(self, finite: bool) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: TrainState) -> None:
        pass

    def grow(self) -> None:
        pass

    def back_off(self) -> bool:
        return False


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
    has_values: bool = True
    """False on a device that computes nothing, see `DeviceBackend.has_values`: every step is accepted."""

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
        if not self.has_values:
            return "accept"
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

    # the callbacks of a step, in the order of these methods; `before_passes` and `after_passes` are collective calls

    def before_passes(self, batches: Callable[[], Sequence[Batch]]) -> None:
        """Call the callbacks before the passes of a step; `batches` returns the micro-batches of this rank."""
        for callback in self.callbacks:
            callback.before_passes(batches, self.loss_scale.value)

    def after_passes(self, metrics: dict[str, float], requests: Collection[str], is_logged: bool) -> None:
        """Call the callbacks before the update, and add their metrics where they may be logged.

        Args:
            metrics: metrics of the global batch so far, with the number of ranks that have each request.
            requests: names of the requests; a step with one may be logged as the last one.
            is_logged: True where the step is logged anyway.
        """
        reads = is_logged or any(metrics[name] for name in requests)
        for callback in self.callbacks:
            callback.after_passes()
            if reads:
                metrics |= callback.metrics()

    def after_update(self) -> None:
        """End a step that was accepted."""
        for callback in self.callbacks:
            callback.after_update()
        self.loss_scale.grow()

    def after_skip(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """End a step that was not accepted; return its metrics without infinity and NaN, which JSON does not have."""
        for callback in self.callbacks:
            callback.after_skip()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
