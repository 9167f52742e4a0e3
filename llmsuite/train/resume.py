"""Resuming a run: whether a checkpoint is one of the same run, and loading it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.adapter_base import check_base
from llmsuite.checkpoint.directory import find_latest, list_steps, name_latest, remove_unfinished
from llmsuite.checkpoint.own_disks import OwnDisk
from llmsuite.checkpoint.train_state import TrainState, load_state
from llmsuite.errors import UserError
from llmsuite.files import read_json_object
from llmsuite.parallel import collective
from llmsuite.parallel.learning_rate import Schedule
from llmsuite.parallel.optimizer import SavedOptimizer
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.regular import is_file
from llmsuite.schema.section import as_plain
from llmsuite.shown import redacted_data
from llmsuite.train.build import BuiltModel
from llmsuite.train.cadence import Cadence, total_steps
from llmsuite.train.fetching import find_on_disks, place_of, reading
from llmsuite.train.length import LENGTH, check_length, is_restated, length_keys
from llmsuite.train.model_state import restore, wanted_tensors
from llmsuite.train.stage import Stage

# Keys that may differ between a run and its continuation: they do not change what is trained.
_FREE_ON_RESUME = (
    "checkpoint", "launch", "parallel", "loggers", "output_dir", "device", "engine", "source",
    "train.on_nonfinite", "train.on_spike", "train.spike_factor", "train.max_bad_steps",
    "train.log_steps", "train.eval_steps", "train.micro_batch_size", "train.micro_batch_tokens",
    "data.group_by_length", "data.num_workers", "rollout.openai", "rollout.batch_size",
    "reward.workers", "environment.workers", "lora.init_passes", "generation",
)  # fmt: skip


class Beginning:
    """How a run begins, and what a checkpoint has to fit to be one of it."""

    def __init__(self, plan: RunPlan, model_digest: str, stage: Stage[Any] | None, cadence: Cadence):
        """
        Args:
            plan: the run.
            model_digest: of the initial weights.
            stage: reads the data; None on ranks that compare nothing.
            cadence: how long the run is.
        """
        self._plan, self._model, self._cadence = plan, model_digest, cadence
        self._files = None if stage is None else _file_digests(plan, stage)
        self._train = as_plain(plan.recipe.train)
        self.schedule = Schedule.of(self._train, cadence.total_steps)
        own = length_keys(self._train)
        self.state = TrainState(
            step=0,
            samples=0,
            seed=plan.recipe.seed,
            recipe_sha256=self.digest(own),
            begun_with=own,
            schedule=dataclasses.asdict(self.schedule),
        )
        """That of a run that begins."""

    def digest(self, begun_with: Mapping[str, Any]) -> str:
        """See `run_digest`: of this recipe with the length that the run had when it began."""
        if self._files is None:
            return ""
        keys = _training_keys(as_plain(self._plan.recipe)) | {f"train.{key}": v for key, v in begun_with.items()}
        return _digest(keys, self._model, self._files)

    def continued(self, path: Path, state: TrainState) -> TrainState:
        """The state of a checkpoint, as that of this run.

        Raises:
            UserError: it is of another run, or of one with another length that cannot go on with this one.
        """
        train = _started_train(self._plan) or self._train  # of a checkpoint that does not tell
        begun_with = state.begun_with or length_keys(train)
        if state.recipe_sha256 != self.digest(begun_with):
            raise _of_another_run(
                self._plan, path, _differing_keys(self._plan) or ["the content of its data or weights"]
            )
        steps = total_steps(
            train.get("max_steps"), train.get("num_epochs"), self._cadence.num_samples, train["global_batch_size"]
        )
        then = Schedule(**state.schedule) if state.schedule else Schedule.of(train, steps)
        check_length(then, self.schedule, state.step, path, is_restated(self._plan.loaded.origins))
        return dataclasses.replace(state, begun_with=begun_with, schedule=self.state.schedule)


def check_recipe(plan: RunPlan) -> None:
    """Before data and model are read, which may take long: whether checkpoints to go on from are of this recipe.
    What is in files `resume_from` compares, and how long an epoch is it knows.

    Raises:
        UserError: they were written with another one.
    """
    found = list_steps(plan.output_dir / "checkpoints")
    if found and (differing := _differing_keys(plan)):
        raise _of_another_run(plan, plan.output_dir, differing)
    whole = [(step, path) for step, path in found if is_file(path / "state.json")]
    if not whole or (total := plan.recipe.train.max_steps) is None:
        return
    step, path = whole[-1]
    started, state = _started_train(plan), load_state(path)
    if state.schedule:
        then = Schedule(**state.schedule)
    elif started is not None and started.get("max_steps") is not None:
        then = Schedule.of(started, started["max_steps"])
    else:
        return
    now = Schedule.of(as_plain(plan.recipe.train), total)
    check_length(then, now, step, path, is_restated(plan.loaded.origins))


def resume_from(
    plan: RunPlan,
    begin: Beginning,
    checkpoints: Path,
    registry: Registry,
    built: BuiltModel,
    optimizer: SavedOptimizer,
    disk: OwnDisk | None = None,
    others: Sequence[Callable[[Path], None]] = (),
) -> TrainState:
    """The newest whole checkpoint, loaded; step 0 when there never was one. Every rank calls it.

    Args:
        plan: the run.
        begin: how the run begins, which the checkpoint has to fit.
        checkpoints: directory with the checkpoints.
        registry: known model families.
        built: the model, which gets the saved values.
        optimizer: gets its saved state.
        disk: this machine, where machines share no output_dir.
        others: what else is loaded from it.

    Raises:
        UserError: none is whole, or they are of another run.
    """
    found, path = -1, None
    continued: TrainState | None = None
    if disk is not None:
        path = find_on_disks(checkpoints, disk, wanted_tensors(plan, built, optimizer))
        path = None if path is None else place_of(path)
    if collective.rank() == 0:  # one rank looks and checks, so that all go on from the same
        if disk is None:
            remove_unfinished(checkpoints)
            path = find_latest(checkpoints, report)
        if path is not None:
            if built.adapters is not None:
                check_base(path, built.adapters.base)
            continued = begin.continued(path, load_state(path))
            found = continued.step
            name_latest(checkpoints, path)
        elif list_steps(checkpoints):
            raise UserError(f"{checkpoints}: none of its checkpoints is whole; move them away to start at step 0")
    found = int(collective.from_first_rank([float(found)])[0])
    if found < 0:
        report(f"no checkpoint in {checkpoints}; starting at step 0")
        return begin.state
    path = checkpoints / f"step-{found}"
    with reading(path, disk) as place:
        state = load_all(place, plan, registry, built, optimizer)
        for load in others:
            load(place)
    report(f"resuming from {path}")
    return state if continued is None else continued


def load_all(path: Path, plan: RunPlan, registry: Registry, built: BuiltModel, optimizer: SavedOptimizer) -> TrainState:
    """Load model, optimizer and input scales of a checkpoint."""
    state = load_state(path)
    restore(path, plan, registry, built, optimizer, collective.mesh())
    if built.input_scales is not None:
        assert state.rounded is not None, "the digest of the recipe has to tell"
        built.input_scales.load(state.rounded)
    return state


def rounded(built: BuiltModel) -> dict[str, list[float]] | None:
    """The part of a checkpoint about fake-quantised layers: their names, and the scales of their inputs."""
    if built.input_scales is not None:
        return built.input_scales.state()
    return {name: [] for name in built.rounded} or None


def _training_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """The part of a resolved recipe that decides what is trained, by dotted key. Secrets of URLs, which change, do
    not."""
    recipe = redacted_data(recipe)
    flat: dict[str, Any] = {"engine.precision": recipe["engine"]["precision"]}
    for section, value in recipe.items():
        if section in _FREE_ON_RESUME:
            continue
        keys = {f"{section}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {section: value}
        flat.update({key: v for key, v in keys.items() if key not in _FREE_ON_RESUME})
    return flat


def run_digest(plan: RunPlan, model_digest: str, stage: Stage[Any]) -> str:
    """Digest of recipe, initial model and content of the data: equal digests are the same run."""
    return _digest(_training_keys(as_plain(plan.recipe)), model_digest, _file_digests(plan, stage))


def _file_digests(plan: RunPlan, stage: Stage[Any]) -> list[str]:
    return [stage.digest(path) for path in (plan.train_path, plan.eval_path) if path is not None]


def _digest(keys: Mapping[str, Any], model: str, files: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([keys, model, files], sort_keys=True).encode()).hexdigest()


def _of_another_run(plan: RunPlan, path: Path, differing: Sequence[str]) -> UserError:
    recipe, anew = plan.recipe, "give it as model.weights of a run with another --output_dir"
    if recipe.lora.rank is not None:
        anew = "`llmsuite merge` it and give that as model.weights of a run with another --output_dir"
    elif recipe.reft.rank is not None or recipe.prefix.tokens is not None:  # no matrix can take them in
        anew = "choose another --output_dir"
    return UserError(
        f"{path}: was written by a run that differs in {', '.join(differing)}; resume it with "
        f"{plan.output_dir / 'recipe.json'} and the same files, or {anew}"
    )


def _differing_keys(plan: RunPlan) -> list[str]:
    """Keys in which the recipe differs from the one the run was started with; `check_length` judges those of its
    length."""
    if (started := _started_recipe(plan)) is None:
        return []
    now, then = _training_keys(as_plain(plan.recipe)), _training_keys(started)
    may_differ = {f"train.{key}" for key in LENGTH}
    return sorted(key for key in (now.keys() | then.keys()) - may_differ if now.get(key) != then.get(key))


def _started_recipe(plan: RunPlan) -> Any:
    """The recipe that the run in output_dir was last started with; None where there is none."""
    path = plan.output_dir / "recipe.json"
    return read_json_object(path) if is_file(path) else None


def _started_train(plan: RunPlan) -> dict[str, Any] | None:
    """Its section `train`."""
    started = _started_recipe(plan)
    return None if started is None else started["train"]
