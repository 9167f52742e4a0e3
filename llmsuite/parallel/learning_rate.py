"""The learning rate as a function of the step: warm-up, then decay towards the floor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from llmsuite.contract.schema.recipe import TrainSection

_DECAY = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
}
"""Fraction of the distance between peak and floor that is left, as a function of the fraction of decay steps done."""
_WSD_DECAY_RATIO = 0.1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Everything that the learning rates of a run depend on: keys of the section `train`, and the number of steps."""

    total_steps: int
    learning_rate: float
    lr_schedule: str
    decay_ratio: float | None = None
    decay_type: str | None = None
    warmup_ratio: float = 0.0
    warmup_steps: int | None = None
    warmup_rounding: str = "up"
    warmup_from_zero: bool = False
    min_lr_ratio: float = 0.0

    @classmethod
    def of(cls, train: Mapping[str, Any], total_steps: int) -> Schedule:
        """The schedule of a section `train` as JSON data."""
        return cls(total_steps, train["learning_rate"], **{key: train[key] for key in COURSE if key in train})


COURSE = tuple(
    field.name for field in dataclasses.fields(Schedule) if field.name not in ("total_steps", "learning_rate")
)
"""The keys of `train` that shape the warm-up and the decay."""


class LearningRate:
    """Learning rate of each step, counted from 1.

    `constant`, `linear` and `cosine` follow transformers' `get_scheduler`; the warm-up starts one step earlier than
    there, unless `train.warmup_from_zero` is set. `wsd` is warm-up, stable, decay: Hu et al. 2024 (arXiv 2404.06395),
    section 4; its decay by 1 - sqrt: Haegele et al. 2024 (arXiv 2405.18392).
    """

    def __init__(self, train: TrainSection | Schedule, total_steps: int):
        """
        Args:
            train: section of the recipe, or the part of it that the schedule depends on.
            total_steps: steps of the run; where the rate ends.
        """
        self._peak = train.learning_rate
        self._floor = train.min_lr_ratio
        # rounded first: 0.07 * 100 is a little more than 7
        by_ratio = math.ceil(round(train.warmup_ratio * total_steps, 6))
        if train.warmup_rounding == "axolotl":
            by_ratio = int(train.warmup_ratio * total_steps)
            by_ratio = 2 if by_ratio == 1 else by_ratio
        self.warmup_steps = by_ratio if train.warmup_steps is None else train.warmup_steps
        self._from_zero = train.warmup_from_zero
        schedule = train.lr_schedule
        shape = train.decay_type
        self._last_stable = self.warmup_steps  # the last step before the decay
        if schedule == "wsd":
            ratio = _WSD_DECAY_RATIO if train.decay_ratio is None else train.decay_ratio
            # rounded first: 0.07 * 100 is more than 7 in binary, and would be a step more
            self._last_stable = max(self._last_stable, total_steps - math.ceil(round(ratio * total_steps, 6)))
            schedule = shape or "linear"
        self._num_decay_steps = total_steps - self._last_stable
        self._decay = None if schedule == "constant" else _DECAY[schedule]

    def at(self, step: int) -> float:
        """Learning rate of a step."""
        if step <= self.warmup_steps:
            return self._peak * (step - self._from_zero) / self.warmup_steps
        if self._decay is None or step <= self._last_stable:
            return self._peak
        # the first step after warm-up has the full rate; the floor is where the step after the last would be
        done = (step - self._last_stable - 1) / self._num_decay_steps
        return self._peak * (self._floor + (1 - self._floor) * self._decay(done))
