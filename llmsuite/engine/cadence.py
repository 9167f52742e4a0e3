"""Length of a run, and the steps after which it records, evaluates and saves."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.recipe.plans import TrainPlan


def total_steps(max_steps: int | None, num_epochs: int | None, num_samples: int, global_batch_size: int) -> int:
    """Number of optimizer steps of a run with `num_samples` training samples an epoch."""
    return max_steps or math.ceil((num_epochs or 1) * num_samples / global_batch_size)


def evaluation_interval(train: TrainSection, total: int) -> int | Literal["epoch"] | None:
    """Return `train.eval_steps` in steps of a run with `total` steps."""
    if isinstance(train.eval_steps, float):
        return math.ceil(train.eval_steps * total)
    return train.eval_steps


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Intervals in optimizer steps; None for only after the last step, "epoch" for the steps that end an epoch."""

    total_steps: int
    global_batch_size: int
    log_steps: int
    eval_steps: int | Literal["epoch"] | None
    save_steps: int | Literal["epoch"] | None
    num_samples: int

    @classmethod
    def from_plan(cls, train_plan: TrainPlan, num_samples: int) -> Cadence:
        """Build the cadence of a run with `num_samples` training samples an epoch."""
        train = train_plan.section
        # epochs follow each other without a gap, so only the last step may take samples beyond the last epoch
        total = total_steps(train.max_steps, train.num_epochs, num_samples, train.global_batch_size)
        save = train_plan.checkpoint.save_steps
        every = evaluation_interval(train, total)
        return cls(total, train.global_batch_size, train.log_steps, every, save, num_samples)

    def logs(self, step: int) -> bool:
        """Return True if the metrics of a step are recorded."""
        return step == self.total_steps or step % self.log_steps == 0

    def saves(self, step: int) -> bool:
        """Return True if a checkpoint is written after a step."""
        return step == self.total_steps or self._is_due(step, self.save_steps)

    def evaluates(self, step: int) -> bool:
        """Return True if the model is evaluated after a step."""
        return step == self.total_steps or self._is_due(step, self.eval_steps)

    def _is_due(self, step: int, every: int | Literal["epoch"] | None) -> bool:
        if every == "epoch":  # epochs follow without a gap: one step may end an epoch and start the next
            taken = step * self.global_batch_size
            return taken // self.num_samples > (taken - self.global_batch_size) // self.num_samples
        return every is not None and step % every == 0
