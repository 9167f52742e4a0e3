"""The learning rate as a function of the step: warm-up, then a course towards the floor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from llmsuite.schema.recipe import TrainSection

_FALL = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
}
"""Share of the way between peak and floor that is left, by the share of the steps that are done."""
_WSD_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All that the learning rates of a run depend on: keys of the section `train`, and the number of its steps."""

    total_steps: int
    learning_rate: float
    lr_schedule: str
    decay_ratio: float | None = None
    decay_type: str | None = None
    warmup_ratio: float = 0.0
    warmup_steps: int | None = None
    warmup_from_zero: bool = False
    min_lr_ratio: float = 0.0

    @classmethod
    def of(cls, train: Mapping[str, Any], total_steps: int) -> Schedule:
        """That of a section `train` as JSON data."""
        return cls(total_steps, train["learning_rate"], **{key: train[key] for key in COURSE if key in train})


COURSE = tuple(
    field.name for field in dataclasses.fields(Schedule) if field.name not in ("total_steps", "learning_rate")
)
"""The keys of `train` that say how the learning rate rises and falls."""


class LearningRate:
    """The rate of each step, counted from 1.

    Constant, linear and cosine are those of transformers' `get_scheduler`; the warm-up begins one step earlier than
    there, unless `train.warmup_from_zero` is set. wsd, warm-up, stable, decay: Hu et al. 2024 (arXiv 2404.06395),
    section 4; the fall by 1 - sqrt: Haegele et al. 2024 (arXiv 2405.18392).
    """

    def __init__(self, train: TrainSection | Schedule, total_steps: int):
        """
        Args:
            train: section of the recipe, or what of it counts.
            total_steps: steps of the run; where the rate ends.
        """
        self._peak, self._floor = train.learning_rate, train.min_lr_ratio
        # rounded first: 0.07 * 100 is a little more than 7
        by_ratio = math.ceil(round(train.warmup_ratio * total_steps, 6))
        self.warmup_steps = by_ratio if train.warmup_steps is None else train.warmup_steps
        self._from_zero = train.warmup_from_zero
        schedule, shape = train.lr_schedule, train.decay_type
        self._begin = self.warmup_steps  # the last step before the rate falls
        if schedule == "wsd":
            share = _WSD_DECAY if train.decay_ratio is None else train.decay_ratio
            self._begin = max(self._begin, total_steps - math.ceil(round(share * total_steps, 6)))
        self._num_falling = total_steps - self._begin
        self._fall = None if schedule == "constant" else _FALL[shape or "linear" if schedule == "wsd" else schedule]

    def at(self, step: int) -> float:
        """Rate of a step."""
        if step <= self.warmup_steps:
            return self._peak * (step - self._from_zero) / self.warmup_steps
        if self._fall is None or step <= self._begin:
            return self._peak
        # the first step after warm-up has the full rate; the floor is where the step after the last would be
        done = (step - self._begin - 1) / self._num_falling
        return self._peak * (self._floor + (1 - self._floor) * self._fall(done))
