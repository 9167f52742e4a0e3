"""Dynamic loss scaling for fp16, whose gradients would otherwise vanish below 6e-8 or overflow above 65504.

Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import dataclasses

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
