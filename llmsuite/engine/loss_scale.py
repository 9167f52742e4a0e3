"""Dynamic loss scaling for fp16, whose gradients would otherwise vanish below 6e-8 or overflow above 65504.

Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llmsuite.checkpoint.train_state import TrainState

GROWTH_STEPS = 2000
LOWEST = 2.0**-14


@dataclasses.dataclass
class LossScale:
    """Factor of the loss before the backward pass; the gradients are divided by it afterwards."""

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
