"""Bad steps: not finite, or with a gradient far larger than those before. The recipe decides what becomes of them.

A decision is a function of numbers that are equal on all ranks, and of what a checkpoint has: so all ranks decide
alike, and a run that is resumed decides as the one that was not stopped.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Literal

from llmsuite.checkpoint.train_state import TrainState
from llmsuite.errors import UserError
from llmsuite.schema.recipe import TrainSection

Answer = Literal["stop", "skip", "roll_back"]
Verdict = Literal["accept", "skip", "roll_back"]
WINDOW, LEAST = 32, 8
"""Steps whose gradient norms are compared with, and how many there have to be."""


class NonFiniteLoss(UserError):
    """The loss or the gradient is infinite or not a number; the parameters are as they were before the step."""


class LossSpike(UserError):
    """The gradient is far larger than those before; the parameters are as they were before the step."""


@dataclasses.dataclass
class Guard:
    """Judges every step before anything is updated."""

    on_nonfinite: Answer = "stop"
    on_spike: Answer = "skip"
    spike_factor: float | None = None
    max_bad_steps: int = 10
    norms: list[float] = dataclasses.field(default_factory=list)
    """Gradient norms of the last accepted steps; kept where they are needed."""
    bad_steps: int = 0
    """Steps that were not accepted since `max_step`."""
    max_step: int = 0
    """The last step that was accepted, before any roll-back."""

    @classmethod
    def of(cls, train: TrainSection) -> Guard:
        """The guard that a recipe asks for."""
        return cls(train.on_nonfinite, train.on_spike, train.spike_factor, train.max_bad_steps)

    def state(self) -> dict[str, Any]:
        """Fields of a checkpoint's `TrainState`."""
        return {"norms": tuple(self.norms), "bad_steps": self.bad_steps, "furthest": self.max_step}

    def resume(self, state: TrainState) -> None:
        """Go on as the run that wrote a checkpoint."""
        self.norms, self.bad_steps, self.max_step = list(state.norms), state.bad_steps, state.furthest

    def roll_back(self, state: TrainState) -> None:
        """Compare with the steps before a checkpoint again; bad steps stay counted, or the run might go in circles."""
        self.norms = list(state.norms)

    @property
    def _usual(self) -> float:
        """The gradient norm that others are compared with; infinite while there are too few."""
        return statistics.median(self.norms) if len(self.norms) >= LEAST else math.inf

    @property
    def largest_norm(self) -> float:
        """The largest gradient norm that is no spike in the next step."""
        return math.inf if self.spike_factor is None else self.spike_factor * self._usual

    def judge(self, step: int, loss: float, norm: float, note: str = "") -> Verdict:
        """What to do with a step.

        Args:
            step: counted from 1.
            loss: of the global batch.
            norm: of its gradient, before it is clipped.
            note: what else to tell when the run stops because they are not finite.

        Raises:
            NonFiniteLoss, LossSpike: the run has to stop.
        """
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite and norm <= self.largest_norm:
            if self.spike_factor is not None:
                self.norms = [*self.norms, norm][-WINDOW:]
            if step > self.max_step:
                self.bad_steps, self.max_step = 0, step
            return "accept"
        self.bad_steps += 1
        answer = self.on_spike if finite else self.on_nonfinite
        many = answer != "stop" and self.bad_steps > self.max_bad_steps
        if answer != "stop" and not many:
            return answer
        why = f" This has happened {self.bad_steps} times, more than train.max_bad_steps." if many else ""
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
