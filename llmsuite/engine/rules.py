"""Rules of the steps of a run: which are applied, with which loss scale, and who is called in between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from llmsuite.base.errors import UserError
from llmsuite.engine.guard import Guard, StepDecision
from llmsuite.engine.loss_scale import LossScale, NoLossScale
from llmsuite.engine.step_callback import StepCallback


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


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step that was not accepted, without infinity and NaN, which JSON does not have."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
