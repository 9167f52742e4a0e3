"""A run that goes on with another length, or another course of the learning rate.

It may where the steps that are done would have had the same learning rates: then it is, bit for bit, the run that had
the new length from the start. Else the user has to say that the rate is to leave its course.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.parallel.learning_rate import COURSE, LearningRate, Schedule
from llmsuite.progress import report

LENGTH = ("max_steps", "num_epochs", *COURSE)
"""The keys of `train` that may be others when a run goes on."""


def is_restated(origins: Mapping[tuple[str, ...], str]) -> bool:
    """Whether the command line gives the schedule, by where each key of a recipe was written."""
    return origins.get(("train", "lr_schedule"), "").startswith("--train")


def check_length(then: Schedule, now: Schedule, step: int, path: Path, restated: bool) -> None:
    """Whether a run may go on from a checkpoint with another schedule.

    Args:
        then: that of the checkpoint.
        now: that of the recipe.
        step: of the checkpoint.
        path: the checkpoint.
        restated: see `is_restated`.

    Raises:
        UserError: the steps that are done would have had other learning rates, and no longer run says on the command
            line how the rate is to go on; or the run would have ended before.
    """
    if now == then:
        return
    if now.total_steps < step:
        raise UserError(
            f"{path}: has step {step}, and the run is to have {now.total_steps} steps now; raise train.max_steps (or "
            "num_epochs), or remove the checkpoints behind that step"
        )
    first = _first_difference(then, now, step)
    if first is None:
        return
    if restated and now.total_steps > then.total_steps:
        before, behind = _rates(then).at(step), _rates(now).at(step + 1)
        report(f"learning rate: {before:.4g} at step {step}, {behind:.4g} at step {step + 1}, as restated")
        return
    raise UserError(f"{path}: {_why(then, now, first)}; {_what_to_do(then, now, step)}")


def _rates(schedule: Schedule) -> LearningRate:
    return LearningRate(schedule, schedule.total_steps)


def _first_difference(then: Schedule, now: Schedule, step: int) -> int | None:
    """The first step up to this one whose learning rates differ; None where none does."""
    old, new = _rates(then), _rates(now)
    return next((at for at in range(1, step + 1) if old.at(at) != new.at(at)), None)


def _why(then: Schedule, now: Schedule, first: int) -> str:
    old, new = _rates(then).at(first), _rates(now).at(first)
    others = [key for key in COURSE if getattr(then, key) != getattr(now, key)]
    changed = [f"train.{key} was {getattr(then, key)} and is {getattr(now, key)}" for key in others]
    if then.total_steps != now.total_steps:
        changed.insert(0, f"the run had {then.total_steps} steps and is to have {now.total_steps}")
    return (
        f"{', '.join(changed)}; its learning rate was computed for {then.total_steps} steps with {then.lr_schedule}: "
        f"step {first} had {old:.4g} and would have had {new:.4g}"
    )


def _what_to_do(then: Schedule, now: Schedule, step: int) -> str:
    back = f"resume it with {then.total_steps} steps and the schedule it had"
    if now.total_steps <= then.total_steps:
        return back
    warm = _rates(then).warmup_steps
    in_steps = dataclasses.replace(now, warmup_ratio=0.0, warmup_steps=warm or None)
    if now.warmup_ratio and _first_difference(then, in_steps, step) is None:
        return f"give the warm-up in steps, as it was: --train.warmup_steps={warm} --train.warmup_ratio=0; or {back}"
    rate = _rates(now).at(step + 1)
    return (
        f"to go on all the same, restate the schedule: with --train.lr_schedule={now.lr_schedule} step {step + 1} gets "
        f"the {rate:.4g} of a run of {now.total_steps} steps, and constant, linear, cosine or wsd may stand there; or "
        f"{back}"
    )


def length_keys(train: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a section `train` as JSON data that may change."""
    return {key: train.get(key) for key in LENGTH}
