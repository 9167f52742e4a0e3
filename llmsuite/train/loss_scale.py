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
    """What the loss is multiplied with before the backward pass, and the gradients are divided by afterwards."""

    value: float = 2.0**10
    """The engine differentiates a sum over the micro-batch, not a mean: so less than the usual 65536, and it may get
    below 1."""
    good_steps: int = 0
    """Steps with finite gradients since the value changed."""

    @property
    def note(self) -> str:
        """What to add to the message when a step is not finite and the scale cannot get lower."""
        return f" The loss scale is at its lowest, {self.value:.0e}."

    def metrics(self, finite: bool) -> dict[str, float]:
        """Metrics of a step with finite gradients, or without."""
        return {"loss_scale": self.value, "skipped": 0.0 if finite else 1.0}

    def state(self) -> dict[str, Any]:
        """Fields of a checkpoint's `TrainState`."""
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load(self, state: TrainState) -> None:
        """Go on with the scale of a checkpoint, if that has one."""
        if state.loss_scale is not None:
            self.value, self.good_steps = state.loss_scale, state.good_steps

    def grow(self) -> None:
        """After a step with finite gradients: double the value every 2,000 of them."""
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = 2 * self.value, 0

    def back_off(self) -> bool:
        """After a step that has to be skipped: halve the value. False when it cannot get lower."""
        if self.value <= LOWEST:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True


class NoLossScale:
    """The identity, for precisions whose gradients neither vanish nor overflow."""

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
