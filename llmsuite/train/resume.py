"""Resuming a run: whether a checkpoint is one of the same run, and loading it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.adapter_base import check_base
from llmsuite.checkpoint.directory import find_latest, list_steps, name_latest, remove_unfinished
from llmsuite.checkpoint.own_disks import OwnDisk
from llmsuite.checkpoint.train_state import TrainState, load_state
from llmsuite.errors import UserError
from llmsuite.files import read_json_file
from llmsuite.parallel import collective
from llmsuite.parallel.optimizer import SavedOptimizer
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.schema.section import as_plain
from llmsuite.shown import redacted_data
from llmsuite.train.build import BuiltModel
from llmsuite.train.fetching import find_on_disks, place_of, reading
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


def fresh(recipe_sha256: str, seed: int) -> TrainState:
    """The state of a run that begins."""
    return TrainState(step=0, samples=0, seed=seed, recipe_sha256=recipe_sha256)


def check_recipe(plan: RunPlan) -> None:
    """Before data and model are read, which may take long: whether checkpoints to go on from are of this recipe.
    What is in files `resume_from` compares.

    Raises:
        UserError: they were written with another one.
    """
    if list_steps(plan.output_dir / "checkpoints") and (differing := _differing_keys(plan)):
        raise _of_another_run(plan, plan.output_dir, differing)


def resume_from(
    plan: RunPlan,
    begin: TrainState,
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
        begin: state of a run that begins; its digest has to be that of the checkpoint.
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
    if disk is not None:
        path = find_on_disks(checkpoints, disk, wanted_tensors(plan, built, optimizer))
        path = None if path is None else place_of(path)
    if collective.rank() == 0:  # one rank looks and checks, so that all go on from the same
        if disk is None:
            remove_unfinished(checkpoints)
            path = find_latest(checkpoints, report)
        if path is not None:
            state = load_state(path)
            if built.adapters is not None:
                check_base(path, built.adapters.base)
            if state.recipe_sha256 != begin.recipe_sha256:
                raise _of_another_run(plan, path, _differing_keys(plan) or ["the content of its data or weights"])
            found = state.step
            name_latest(checkpoints, path)
        elif list_steps(checkpoints):
            raise UserError(f"{checkpoints}: none of its checkpoints is whole; move them away to start at step 0")
    found = int(collective.from_first_rank([float(found)])[0])
    if found < 0:
        report(f"no checkpoint in {checkpoints}; starting at step 0")
        return begin
    path = checkpoints / f"step-{found}"
    with reading(path, disk) as place:
        state = load_all(place, plan, registry, built, optimizer)
        for load in others:
            load(place)
    report(f"resuming from {path}")
    return state


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
    files = [stage.digest(path) for path in (plan.train_path, plan.eval_path) if path is not None]
    data = [_training_keys(as_plain(plan.recipe)), model_digest, files]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


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
    """Keys in which the recipe differs from the one the run was started with."""
    started = plan.output_dir / "recipe.json"
    if not started.is_file():
        return []
    now, then = _training_keys(as_plain(plan.recipe)), _training_keys(read_json_file(started))
    return sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
