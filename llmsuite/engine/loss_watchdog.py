"""Loss watchdog: ends a run whose loss stays too high."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from llmsuite.contract.schema.recipe import LossWatchdogSection


@dataclasses.dataclass
class LossWatchdog:
    """Counts the steps in a row whose loss is above a threshold. Every rank has an instance and gives it the same
    losses.

    As the callback of Axolotl, it looks at the loss of a step when the next one ends, and not at all where the model
    was evaluated in between.
    """

    threshold: float | None = None
    """None for no watchdog."""
    patience: int = 3
    """Number of steps in a row after which the run ends."""
    violations: int = 0
    """Number of steps in a row whose loss was above the threshold."""
    last_loss: float | None = None
    """Loss of the last step; None before the first one, and after an evaluation."""

    @classmethod
    def from_section(cls, section: LossWatchdogSection) -> LossWatchdog:
        """Build the watchdog of a recipe."""
        return cls(section.threshold, section.patience)

    @property
    def is_over(self) -> bool:
        """True where the run has to end."""
        return self.threshold is not None and self.violations >= self.patience

    @property
    def reason(self) -> str:
        """The reason why the run ends, for a message."""
        return f"the loss of {self.violations} steps was above train.loss_watchdog.threshold {self.threshold:g}"

    def step_ended(self, loss: float, is_evaluated: bool) -> None:
        """Look at the loss of the step before.

        Args:
            loss: of this step.
            is_evaluated: True if the model is evaluated after this step.
        """
        if self.threshold is None:
            return
        if self.last_loss is not None:
            self.violations = self.violations + 1 if self.last_loss > self.threshold else 0
        self.last_loss = None if is_evaluated else loss

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON data; empty without a watchdog."""
        if self.threshold is None:
            return {}
        return {"violations": self.violations, "last_loss": self.last_loss}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.violations = state.get("violations", 0)
        self.last_loss = state.get("last_loss")
