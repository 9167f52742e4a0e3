"""Handling of bad steps, whose loss or gradient is not finite or whose gradient is far larger than usual.

A decision depends only on numbers that are equal on all ranks, and on the state in a checkpoint: so all ranks make the
same decision, and a resumed run makes the same one as a run without interruption.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.train_state import TrainState
from llmsuite.contract.schema.recipe import TrainSection

Policy = Literal["stop", "skip", "roll_back"]
StepDecision = Literal["accept", "skip", "roll_back"]
WINDOW = 32
"""Number of accepted steps whose gradient norms make the median."""
LEAST = 8
"""Number of accepted steps before any step counts as a spike."""


class NonFiniteLoss(UserError):
    """The loss or the gradient is infinite or not a number; the step has not changed the parameters."""


class LossSpike(UserError):
    """The gradient is far larger than those before; the step has not changed the parameters."""


@dataclasses.dataclass
class Guard:
    """Decides about every step before anything is updated."""

    on_nonfinite: Policy = "stop"
    on_spike: Policy = "skip"
    spike_factor: float | None = None
    max_bad_steps: int = 10
    norms: list[float] = dataclasses.field(default_factory=list)
    """Gradient norms of the last accepted steps; recorded only with `spike_factor`."""
    bad_steps: int = 0
    """Number of steps that were not accepted since `max_step`."""
    max_step: int = 0
    """Highest step that was accepted, also before a roll-back."""

    @classmethod
    def from_section(cls, train: TrainSection) -> Guard:
        """Build the guard of a recipe."""
        return cls(train.on_nonfinite, train.on_spike, train.spike_factor, train.max_bad_steps)

    def state(self) -> dict[str, Any]:
        """Return the fields of a checkpoint's `TrainState`."""
        return {"norms": tuple(self.norms), "bad_steps": self.bad_steps, "furthest": self.max_step}

    def resume(self, state: TrainState) -> None:
        """Restore the state from a checkpoint."""
        self.norms = list(state.norms)
        self.bad_steps = state.bad_steps
        self.max_step = state.furthest

    def roll_back(self, state: TrainState) -> None:
        """Restore the gradient norms from a checkpoint; bad steps stay counted, or the run might roll back forever."""
        self.norms = list(state.norms)

    @property
    def _usual(self) -> float:
        """Median of the recent gradient norms; infinite while there are too few."""
        return statistics.median(self.norms) if len(self.norms) >= LEAST else math.inf

    @property
    def largest_norm(self) -> float:
        """Largest gradient norm of the next step that is no spike."""
        return math.inf if self.spike_factor is None else self.spike_factor * self._usual

    def decide(self, step: int, loss: float, norm: float, note: str = "") -> StepDecision:
        """Decide whether a step is applied.

        Args:
            step: counted from 1.
            loss: loss of the global batch.
            norm: norm of its gradient, before clipping.
            note: text to add to the message when the run stops because they are not finite.

        Raises:
            NonFiniteLoss, LossSpike: the run has to stop.
        """
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite and norm <= self.largest_norm:
            if self.spike_factor is not None:
                self.norms = [*self.norms, norm][-WINDOW:]
            if step > self.max_step:
                self.bad_steps = 0
                self.max_step = step
            return "accept"
        self.bad_steps += 1
        policy = self.on_spike if finite else self.on_nonfinite
        too_many = policy != "stop" and self.bad_steps > self.max_bad_steps
        if policy != "stop" and not too_many:
            return policy
        why = ""
        if too_many:
            why = f" This has happened {self.bad_steps} times, more than train.max_bad_steps."
        if finite:
            usual = self._usual
            raise LossSpike(
                f"step {step}: gradient norm {norm:.4g} is {norm / usual:.3g} times the usual {usual:.4g}, more than "
                f"train.spike_factor; nothing was updated.{why} Lower train.learning_rate, or look at the rows of "
                "this step"
            )
        raise NonFiniteLoss(
            f"step {step}: loss is {loss}, gradient norm {norm}; nothing was updated.{note}{why} "
            "Lower train.learning_rate, or look at the rows of this step"
        )
