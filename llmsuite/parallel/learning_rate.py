"""The learning rate as a function of the step: warm-up, then a course towards the floor."""

from __future__ import annotations

import math

from llmsuite.schema.recipe import TrainSection

_FALL = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
}
"""Share of the way between peak and floor that is left, by the share of the steps that are done."""
_WSD_DECAY = 0.1


class LearningRate:
    """The rate of each step, counted from 1.

    Constant, linear and cosine are those of transformers' `get_scheduler`; the warm-up begins one step earlier than
    there, unless `train.warmup_from_zero` is set. wsd, warm-up, stable, decay: Hu et al. 2024 (arXiv 2404.06395),
    section 4; the fall by 1 - sqrt: Haegele et al. 2024 (arXiv 2405.18392).
    """

    def __init__(self, train: TrainSection, total_steps: int):
        """
        Args:
            train: section of the recipe.
            total_steps: steps of the run; where the rate ends.
        """
        self._peak, self._floor = train.learning_rate, train.min_lr_ratio
        # rounded first: 0.07 * 100 is a little more than 7
        by_ratio = math.ceil(round(train.warmup_ratio * total_steps, 6))
        self._warmup_steps = by_ratio if train.warmup_steps is None else train.warmup_steps
        self._from_zero = train.warmup_from_zero
        schedule, shape = train.lr_schedule, train.decay_type
        self._begin = self._warmup_steps  # the last step before the rate falls
        if schedule == "wsd":
            share = _WSD_DECAY if train.decay_ratio is None else train.decay_ratio
            self._begin = max(self._begin, total_steps - math.ceil(round(share * total_steps, 6)))
        self._num_falling = total_steps - self._begin
        self._fall = None if schedule == "constant" else _FALL[shape or "linear" if schedule == "wsd" else schedule]

    def at(self, step: int) -> float:
        """Rate of a step."""
        if step <= self._warmup_steps:
            return self._peak * (step - self._from_zero) / self._warmup_steps
        if self._fall is None or step <= self._begin:
            return self._peak
        # the first step after warm-up has the full rate; the floor is where the step after the last would be
        done = (step - self._begin - 1) / self._num_falling
        return self._peak * (self._floor + (1 - self._floor) * self._fall(done))
