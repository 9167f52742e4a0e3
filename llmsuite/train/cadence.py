"""How long a run is, and after which steps something is recorded, evaluated or saved."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from llmsuite.recipe.resolve import RunPlan


def total_steps(max_steps: int | None, num_epochs: int | None, num_samples: int, global_batch_size: int) -> int:
    """Optimizer steps of a run, whose epochs have so many training samples."""
    return max_steps or math.ceil((num_epochs or 1) * num_samples / global_batch_size)


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Counts of optimizer steps; None for never before the last one, "epoch" for those that end an epoch."""

    total_steps: int
    global_batch_size: int
    log_steps: int
    eval_steps: int | Literal["epoch"] | None
    save_steps: int | Literal["epoch"] | None
    num_samples: int

    @classmethod
    def of(cls, plan: RunPlan, num_samples: int) -> Cadence:
        """The cadence of a recipe, whose epochs have so many training samples."""
        train = plan.recipe.train
        # the stream of samples knows no gap between epochs, so only the last step may go beyond the last one
        total = total_steps(train.max_steps, train.num_epochs, num_samples, train.global_batch_size)
        save = plan.recipe.checkpoint.save_steps
        return cls(total, train.global_batch_size, train.log_steps, train.eval_steps, save, num_samples)

    def logs(self, step: int) -> bool:
        """Whether the metrics of a step are recorded."""
        return step == self.total_steps or step % self.log_steps == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after a step."""
        return step == self.total_steps or self._is_due(step, self.save_steps)

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        return step == self.total_steps or self._is_due(step, self.eval_steps)

    def _is_due(self, step: int, every: int | Literal["epoch"] | None) -> bool:
        if every == "epoch":  # the stream of samples knows no gap, so a step may end one epoch and begin the next
            taken = step * self.global_batch_size
            return taken // self.num_samples > (taken - self.global_batch_size) // self.num_samples
        return every is not None and step % every == 0
