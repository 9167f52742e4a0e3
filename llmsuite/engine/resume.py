"""Resuming a run: check that a checkpoint belongs to the same run, and load it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.progress import report
from llmsuite.base.redaction import redacted
from llmsuite.checkpoint.adapter_base import check_base
from llmsuite.checkpoint.directory import find_latest, list_steps, name_latest, remove_unfinished
from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.checkpoint.train_state import TrainState, load_state
from llmsuite.contract.registry import Registry
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.cadence import Cadence, total_steps
from llmsuite.engine.fetching import fetched_checkpoint, find_on_local_storage, readable_path
from llmsuite.engine.model_state import needed_tensors, restore
from llmsuite.engine.run_record import RunRecord, check_length, length_keys, training_keys
from llmsuite.engine.stage import Stage
from llmsuite.parallel import collective
from llmsuite.parallel.base_optimizer import BaseOptimizer
from llmsuite.parallel.learning_rate import Schedule
from llmsuite.recipe.plans import DataPlan, ModelPlan, evaluation_data

_WEIGHTS = "the initial weights"
"""Name of the digest of the initial model among those of the inputs."""


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
