"""How long a run is, and after which steps something is recorded, evaluated or saved."""

from __future__ import annotations

import dataclasses
import math

from llmsuite.recipe.resolve import RunPlan


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Counts of optimizer steps; None for never before the last one."""

    total_steps: int
    global_batch_size: int
    log_steps: int
    eval_steps: int | None
    save_steps: int | None

    @classmethod
    def of(cls, plan: RunPlan, num_samples: int) -> Cadence:
        """The cadence of a recipe, whose epochs have so many training samples."""
        train = plan.recipe.train
        # the stream of samples knows no gap between epochs, so only the last step may go beyond the last one
        total = train.max_steps or math.ceil((train.num_epochs or 1) * num_samples / train.global_batch_size)
        return cls(total, train.global_batch_size, train.log_steps, train.eval_steps, plan.recipe.checkpoint.save_steps)

    def logs(self, step: int) -> bool:
        """Whether the metrics of a step are recorded."""
        return step == self.total_steps or step % self.log_steps == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after a step."""
        return step == self.total_steps or bool(self.save_steps and step % self.save_steps == 0)

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        return step == self.total_steps or bool(self.eval_steps and step % self.eval_steps == 0)
