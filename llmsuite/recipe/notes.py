"""Notes on valid recipes: training on sample data, training on evaluation data, a warm-up that never ends, and
downloads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.hub.listing import Want
from llmsuite.base.hub.local_copies import cached
from llmsuite.base.hub.names import hub_name
from llmsuite.base.redaction import Url
from llmsuite.base.resources import bundled, find
from llmsuite.base.safe_files import is_dir, is_file, real_path
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.data.read import data_files
from llmsuite.data.remote import is_remote
from llmsuite.recipe.pins import hub_names
from llmsuite.recipe.plans import DataPlan, TrainPlan

_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "evaluation", "test")
"""Words that the names of files with evaluation data begin or end with, in the order of preference for `data.eval`."""


def all_notes(recipe: Recipe, data_plan: DataPlan, train_plan: TrainPlan, device: str) -> list[str]:
    """Return the notes of `llmsuite validate`: what a run would download, and what `llmsuite run` prints."""
    return [*download_notes(recipe), *run_notes(data_plan, train_plan, device)]


def run_notes(data_plan: DataPlan, train_plan: TrainPlan, device: str) -> list[str]:
    """Return the notes that `llmsuite run` prints: what is probably not meant, although it is allowed."""
    if not train_plan.stage.trains:
        return []
    return [*sample_data_notes(data_plan, device), *held_out_notes(data_plan), *warmup_notes(train_plan)]


def sample_data_notes(data_plan: DataPlan, device: str) -> list[str]:
    """Return a note if a run on a real device trains on the small files bundled with llmsuite."""
    if isinstance(data_plan.train_file, Url):
        return []
    path = real_path(data_plan.train_file)
    if device == "cpu" or not path.is_relative_to(bundled("data").resolve()) or not is_file(path):
        return []
    given = data_plan.given("train")
    size = path.stat().st_size / 1e3
    return [f"data.train: {given} is a sample of {size:.0f} kB; name your own data, or hf:ORG/NAME, before a real run"]


def held_out_notes(data_plan: DataPlan) -> list[str]:
    """Return a note for each directory of training data that also has files with evaluation data."""
    notes = []
    for key, given in (("data.train", data_plan.given("train")), *data_plan.mixed):
        files = [] if is_remote(given) else _files_in(find(given))
        held_out = [file for file in files if _preference(file) is not None]
        held_out.sort(key=lambda file: (_preference(file) or 0, file))
        others = [file for file in files if file not in held_out]
        if held_out and others:
            names = " and ".join(file.name for file in held_out)
            advice = _advice(
                key, Path(given), held_out, others, bool(data_plan.eval_files) or data_plan.given("holdout") is not None
            )
            notes.append(f"{key}: all files of {given} are read, so the run also trains on {names}; {advice}")
    return notes


def warmup_notes(train_plan: TrainPlan) -> list[str]:
    """Return a note if the learning rate is still rising at the last step."""
    steps = train_plan.section.max_steps
    warm = train_plan.section.warmup_steps
    if steps is None or warm is None or warm < steps:
        return []
    return [f"train.warmup_steps: is {warm}, and train.max_steps {steps}, so the learning rate rises to the end"]


def _files_in(directory: Path) -> list[Path]:
    try:
        if is_dir(directory):
            return data_files(directory)
        return []
    except (UserError, OSError):  # the run reports it
        return []


def _preference(file: Path) -> int | None:
    """Return the index in `_HELD_OUT` of the word that a file name begins or ends with, without shard numbers; None for
    other names."""
    words = re.findall("[a-z]+", re.sub("[0-9]+-of-[0-9]+", "", file.name.partition(".")[0].lower()))
    return min((_HELD_OUT.index(word) for word in (*words[:1], *words[-1:]) if word in _HELD_OUT), default=None)


def _advice(key: str, directory: Path, held: Sequence[Path], others: Sequence[Path], evaluates: bool) -> str:
    if len(others) > 1:
        return "move files that are not training data to another directory"
    train = f"name {directory / others[0].name} there"
    if evaluates or key != "data.train":
        return train
    return f"{train}, and {directory / held[0].name} in data.eval"


def download_notes(recipe: Recipe) -> list[str]:
    """Return a note for everything that `llmsuite run` would download first."""
    notes = []
    for named in hub_names(recipe):
        name = hub_name(named.name)
        if named.want is not Want.ROWS and name is not None and cached(name, named.want, named.kind) is None:
            notes.append(f"{named.key}: {name} is not on this machine; `llmsuite run` downloads it first")
    return notes
