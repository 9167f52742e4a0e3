"""Resuming a run: check that a checkpoint belongs to the same run, and load it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.progress import report
from llmsuite.base.redaction import redacted, redacted_data
from llmsuite.base.safe_files import is_file
from llmsuite.checkpoint.adapter_base import check_base
from llmsuite.checkpoint.directory import find_latest, list_steps, name_latest, remove_unfinished
from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.checkpoint.train_state import TrainState, load_state
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.cadence import Cadence, total_steps
from llmsuite.engine.fetching import fetched_checkpoint, find_on_local_storage, readable_path
from llmsuite.engine.model_state import needed_tensors, restore
from llmsuite.engine.stage import Stage
from llmsuite.parallel import collective
from llmsuite.parallel.base_optimizer import BaseOptimizer
from llmsuite.parallel.learning_rate import COURSE, LearningRate, Schedule
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.recipe.plans import DataPlan, ModelPlan, evaluation_data

# Keys that may differ between a run and its continuation: they do not change the trained weights.
_FREE_ON_RESUME = (
    "checkpoint", "launch", "parallel", "loggers", "output_dir", "device", "engine", "source",
    "train.on_nonfinite", "train.on_spike", "train.spike_factor", "train.max_bad_steps",
    "train.log_steps", "train.eval_steps", "train.early_stopping", "train.loss_watchdog",
    "train.peak_tflops", "train.profile", "train.micro_batch_size", "train.micro_batch_tokens",
    "data.group_by_length", "data.num_workers", "rollout.openai", "rollout.batch_size",
    "reward.workers", "environment.workers", "lora.init_passes", "generation",
)  # fmt: skip
_WEIGHTS = "the initial weights"
"""Name of the digest of the initial model among those of the inputs."""
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


class RunIdentity:
    """Identity of a run: the digest that its checkpoints have to match, and its initial state."""

    def __init__(self, record: RunRecord, files: Mapping[str, str] | None, model_digest: str, cadence: Cadence):
        """
        Args:
            record: recipe of the run.
            files: result of `file_digests`; None on ranks that do not compare digests.
            model_digest: digest of the initial weights.
            cadence: length of the run.
        """
        self._record = record
        self._model_digest = model_digest
        self._cadence = cadence
        self._files = files
        self._train: Mapping[str, Any] = record.recipe["train"]
        self.schedule = Schedule.of(self._train, cadence.total_steps)
        own = length_keys(self._train)
        self.initial_state = TrainState(
            step=0,
            samples=0,
            seed=record.recipe["seed"],
            recipe_sha256=self.digest(own),
            begun_with=own,
            schedule=dataclasses.asdict(self.schedule),
            inputs={**(files or {}), _WEIGHTS: model_digest},
        )
        """State of a run at step 0."""

    def digest(self, begun_with: Mapping[str, Any]) -> str:
        """Compute `run_digest` of this recipe, with the length keys of the start of the run."""
        if self._files is None:
            return ""
        keys = training_keys(self._record.recipe) | {f"train.{key}": v for key, v in begun_with.items()}
        return run_digest(keys, self._model_digest, self._files)

    def resumed_state(self, path: Path, state: TrainState) -> TrainState:
        """Check the state of a checkpoint, and return it with the length keys of this run.

        Raises:
            UserError: the checkpoint belongs to another run, or cannot be resumed with another length.
        """
        record = self._record
        train = record.started_train() or self._train  # for checkpoints of versions that did not record it
        begun_with = state.begun_with or length_keys(train)
        if state.recipe_sha256 != self.digest(begun_with):
            raise record.different_run_error(path, record.differing_keys() or self._changed_inputs(state.inputs))
        steps = total_steps(
            train.get("max_steps"), train.get("num_epochs"), self._cadence.num_samples, train["global_batch_size"]
        )
        then = Schedule(**state.schedule) if state.schedule else Schedule.of(train, steps)
        check_length(then, self.schedule, state.step, path, record.is_restated)
        return dataclasses.replace(state, begun_with=begun_with, schedule=self.initial_state.schedule)

    def _changed_inputs(self, before: Mapping[str, str]) -> list[str]:
        """Return the inputs of a checkpoint whose content has changed, for a message."""
        now = self.initial_state.inputs
        changed = [name for name in now if now[name] != before.get(name)]
        return [f"the content of {name}" for name in changed if before] or ["the content of its data or weights"]


def resume_from(
    model_plan: ModelPlan,
    identity: RunIdentity,
    checkpoints: Path,
    registry: Registry,
    built: BuiltModel,
    optimizer: BaseOptimizer,
    local_storage: LocalStorage | None = None,
    others: Sequence[Callable[[Path], None]] = (),
) -> TrainState:
    """Load the newest complete checkpoint; start at step 0 when there never was one. A collective call.

    Args:
        model_plan: plan of the model.
        identity: identity of the run, which the checkpoint has to match.
        checkpoints: directory with the checkpoints.
        registry: registered model families.
        built: model that gets the saved values.
        optimizer: optimizer that gets the saved state.
        local_storage: this machine, where machines share no output_dir.
        others: functions that load other parts of the checkpoint.

    Raises:
        UserError: no checkpoint is complete, or they belong to another run.
    """
    found_step = -1
    path = None
    resumed: TrainState | None = None
    if local_storage is not None:
        path = find_on_local_storage(checkpoints, local_storage, needed_tensors(model_plan, built, optimizer))
        if path is not None:
            path = readable_path(path)
    if collective.rank() == 0:  # one rank chooses, so that all ranks resume from the same checkpoint
        if local_storage is None:
            remove_unfinished(checkpoints)
            path = find_latest(checkpoints, report)
        if path is not None:
            if built.adapters is not None:
                check_base(path, built.adapters.base)
            resumed = identity.resumed_state(path, load_state(path))
            found_step = resumed.step
            name_latest(checkpoints, path)
        elif list_steps(checkpoints):
            raise UserError(f"{checkpoints}: none of its checkpoints is complete; move them away to start at step 0")
    found_step = int(collective.broadcast_from_rank0([float(found_step)])[0])
    if found_step < 0:
        report(f"no checkpoint in {checkpoints}; starting at step 0")
        return identity.initial_state
    path = checkpoints / f"step-{found_step}"
    with fetched_checkpoint(path, local_storage) as readable:
        state = load_all(readable, model_plan, registry, built, optimizer)
        for load in others:
            load(readable)
    report(f"resuming from {path}")
    return state if resumed is None else resumed


def load_all(
    path: Path, model_plan: ModelPlan, registry: Registry, built: BuiltModel, optimizer: BaseOptimizer
) -> TrainState:
    """Load model, optimizer and input scales of a checkpoint; returns its state."""
    state = load_state(path)
    restore(path, model_plan, registry, built, optimizer, collective.mesh())
    if built.input_scales is not None:
        assert state.rounded is not None, "the digest of the recipe covers it"
        built.input_scales.load(state.rounded)
    return state


def rounded(built: BuiltModel) -> dict[str, list[float]] | None:
    """Return the names of the fake-quantised layers and the state of their input scales, for a checkpoint."""
    if built.input_scales is not None:
        return built.input_scales.state()
    return {name: [] for name in built.rounded} or None


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


def file_digests(data_plan: DataPlan, stage: Stage[Any]) -> dict[str, str]:
    """Compute the digests of the content of all data files, as the stage reads them, by key and name for messages."""
    files = {f"data.train {data_plan.given('train')}": data_plan.train_path, **stage.reader.mixed_files()}
    evaluations = evaluation_data(data_plan.section)
    for name, path in sorted(data_plan.eval_paths.items()):  # their order does not change what is trained
        key = f"data.eval.{name}" if name else "data.eval"
        files[f"{key} {evaluations[name]}"] = path
    return {redacted(name): stage.reader.digest(path) for name, path in files.items()}


def run_digest(keys: Mapping[str, Any], model: str, files: Mapping[str, str]) -> str:
    """Compute the digest of `training_keys`, initial model and content of the data: equal digests mean the same run."""
    return hashlib.sha256(json.dumps([keys, model, list(files.values())], sort_keys=True).encode()).hexdigest()


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
