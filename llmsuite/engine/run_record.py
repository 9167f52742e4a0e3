"""The recipe that the directory of a run records, compared with another one: may that continue the run?

This module imports no Paddle: `llmsuite sweep` compares the recipes of many runs before it starts one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.progress import report
from llmsuite.base.redaction import redacted_data
from llmsuite.base.safe_files import is_file
from llmsuite.checkpoint.directory import list_steps
from llmsuite.checkpoint.train_state import load_state
from llmsuite.contract.schema.section import as_plain
from llmsuite.parallel.learning_rate import COURSE, LearningRate, Schedule
from llmsuite.recipe.load import LoadedRecipe

# Keys that may differ between a run and its continuation: they do not change the trained weights.
_FREE_ON_RESUME = (
    "checkpoint", "launch", "parallel", "loggers", "output_dir", "device", "engine", "source",
    "train.on_nonfinite", "train.on_spike", "train.spike_factor", "train.max_bad_steps",
    "train.log_steps", "train.eval_steps", "train.early_stopping", "train.loss_watchdog",
    "train.peak_tflops", "train.profile", "train.micro_batch_size", "train.micro_batch_tokens",
    "data.group_by_length", "data.num_workers", "rollout.openai", "rollout.batch_size",
    "reward.workers", "environment.workers", "lora.init_passes", "generation",
)  # fmt: skip
LENGTH_KEYS = ("max_steps", "num_epochs", *COURSE)
"""Keys of `train` that may change when a run is resumed."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The recipe of a run, to be compared with the one that its directory records."""

    recipe: Mapping[str, Any]
    """The resolved recipe as plain data."""
    output_dir: Path
    is_restated: bool
    """True where the command line sets the schedule of the learning rate."""

    @classmethod
    def from_recipe(cls, loaded: LoadedRecipe, output_dir: Path) -> RunRecord:
        return cls(as_plain(loaded.recipe), output_dir, is_restated(loaded.origins))

    def check(self) -> None:
        """Check that the checkpoints to resume from belong to this recipe, before data and model are loaded, which may
        take long. `resume_from` compares the content of files, and the number of epochs.

        Raises:
            UserError: they were written with another recipe.
        """
        found = list_steps(self.output_dir / "checkpoints")
        differing = self.differing_keys() if found else []
        if differing or (found and self._keys_of_later_versions()):
            raise self.different_run_error(self.output_dir, differing)
        complete = [(step, path) for step, path in found if is_file(path / "state.json")]
        total = self.recipe["train"]["max_steps"]
        if not complete or total is None:
            return
        step, path = complete[-1]
        started = self.started_train()
        state = load_state(path)
        if state.schedule:
            then = Schedule(**state.schedule)
        elif started is not None and started.get("max_steps") is not None:
            then = Schedule.of(started, started["max_steps"])
        else:
            return
        now = Schedule.of(self.recipe["train"], total)
        check_length(then, now, step, path, self.is_restated)

    def differing_keys(self) -> list[str]:
        """Return the keys in which the recipe differs from the one the run was started with, without those of its
        length, which `check_length` compares."""
        started = self._started()
        if started is None:
            return []
        now = training_keys(self.recipe)
        then = training_keys(started)
        may_differ = {f"train.{key}" for key in LENGTH_KEYS}
        differing = sorted(key for key in (now.keys() | then.keys()) - may_differ if now.get(key) != then.get(key))
        # equal mappings may have another order, which decides the order of the samples
        for key in ("data.mix", "pretrain.mix"):
            if key not in differing and list(now.get(key) or ()) != list(then.get(key) or ()):
                differing.append(f"the order of {key}")
        return differing

    def differs_in_length(self) -> bool:
        """Return True where a key of the length is another one than in the run that was started."""
        started = self.started_train()
        return started is not None and length_keys(started) != length_keys(self.recipe["train"])

    def started_train(self) -> dict[str, Any] | None:
        """Return section `train` of the recipe that the run was last started with; None without a record of it."""
        started = self._started()
        return None if started is None else started["train"]

    def different_run_error(self, path: Path, differing: Sequence[str]) -> UserError:
        """Return the error for checkpoints at `path` of a run that differs, or of an earlier version: its recipe lacks
        keys that decide what is trained."""
        anew = "give it as model.weights of a run with another --output_dir"
        if self.recipe["lora"]["rank"] is not None:
            anew = "`llmsuite merge` it and give that as model.weights of a run with another --output_dir"
        elif self.recipe["reft"]["rank"] is not None or self.recipe["prefix"]["tokens"] is not None:
            anew = "choose another --output_dir"  # they cannot be merged into a matrix
        if lacking := self._keys_of_later_versions():
            others = [key for key in differing if key not in lacking]
            also = f", and differs in {', '.join(others)}" if others else ""
            return UserError(
                f"{path}: was written by an earlier version of llmsuite, whose recipe lacks {', '.join(lacking)}"
                f"{also}; it cannot be resumed; {anew}"
            )
        return UserError(
            f"{path}: was written by a run that differs in {', '.join(differing)}; resume it with "
            f"{self.output_dir / 'recipe.json'} and the same files, or {anew}"
        )

    def _keys_of_later_versions(self) -> list[str]:
        """Return the keys that the recorded recipe lacks in sections that it has."""
        started = self._started()
        if started is None:
            return []
        then = training_keys(started)
        lacking = [key for key in training_keys(self.recipe) if key not in then]
        return sorted(key for key in lacking if isinstance(started.get(key.split(".")[0]), dict))

    def _started(self) -> Any:
        """Read the recipe that the run in output_dir was last started with; None without such a file."""
        path = self.output_dir / "recipe.json"
        return read_json_object(path) if is_file(path) else None


def training_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a resolved recipe that decide the trained weights, by dotted key; without the secrets of
    URLs, which may change."""
    recipe = redacted_data(recipe)
    flat: dict[str, Any] = {"engine.precision": recipe["engine"]["precision"]}
    for section, value in recipe.items():
        if section in _FREE_ON_RESUME:
            continue
        keys = {section: value}
        if isinstance(value, dict):
            keys = {f"{section}.{key}": v for key, v in value.items()}
        flat.update({key: v for key, v in keys.items() if key not in _FREE_ON_RESUME})
    return flat


# Resuming with another number of steps, or another learning rate schedule, is allowed if the finished steps would have
# had the same learning rates: then the result is, bit for bit, that of a run with the new length from the start.
# Otherwise the user has to restate the schedule on the command line.


def is_restated(origins: Mapping[tuple[str, ...], str]) -> bool:
    """Return True if the command line sets the schedule, given the origin of each key of a recipe."""
    return origins.get(("train", "lr_schedule"), "").startswith("--train")


def check_length(then: Schedule, now: Schedule, step: int, path: Path, restated: bool) -> None:
    """Check that a run may be resumed from a checkpoint with another schedule.

    Args:
        then: schedule of the checkpoint.
        now: schedule of the recipe.
        step: step of the checkpoint.
        path: path of the checkpoint.
        restated: result of `is_restated`.

    Raises:
        UserError: the finished steps would have had other learning rates, and the command line does not restate the
            schedule of a longer run; or the run would have ended before the checkpoint.
    """
    if now == then:
        return
    if now.total_steps < step:
        raise UserError(
            f"{path}: has step {step}, and the run is to have {now.total_steps} steps now; raise train.max_steps (or "
            "num_epochs), or remove the checkpoints after that step"
        )
    first = _first_difference(then, now, step)
    if first is None:
        return
    if restated and now.total_steps > then.total_steps:
        before = _rates(then).at(step)
        after = _rates(now).at(step + 1)
        report(f"learning rate: {before:.4g} at step {step}, {after:.4g} at step {step + 1}, as restated")
        return
    raise UserError(f"{path}: {_why(then, now, first)}; {_what_to_do(then, now, step)}")


def _rates(schedule: Schedule) -> LearningRate:
    return LearningRate(schedule, schedule.total_steps)


def _first_difference(then: Schedule, now: Schedule, step: int) -> int | None:
    """Return the first step up to `step` with different learning rates; None where all are equal."""
    old = _rates(then)
    new = _rates(now)
    return next((at for at in range(1, step + 1) if old.at(at) != new.at(at)), None)


def _why(then: Schedule, now: Schedule, first: int) -> str:
    old = _rates(then).at(first)
    new = _rates(now).at(first)
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
        f"to resume anyway, restate the schedule: with --train.lr_schedule={now.lr_schedule} step {step + 1} gets "
        f"the {rate:.4g} of a run of {now.total_steps} steps, and constant, linear, cosine or wsd may stand there; or "
        f"{back}"
    )


def length_keys(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a section `train`, as JSON data, that may change."""
    return {key: train.get(key) for key in LENGTH_KEYS}
