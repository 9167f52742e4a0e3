"""What a user should know about a recipe that is valid: rows that only show that it runs, rows to evaluate on that it
trains on, a warm-up without an end, and what is fetched first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llmsuite.data.read import data_files
from llmsuite.data.remote import is_remote
from llmsuite.errors import UserError
from llmsuite.hub.here import cached
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.recipe.pins import hub_names, mixed_names
from llmsuite.recipe.resolve import RunPlan
from llmsuite.regular import is_dir, is_file
from llmsuite.resources import bundled, find
from llmsuite.shown import Url

_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "evaluation", "test")
"""Words that the name of a file to evaluate on begins or ends with; the best ones for `data.eval` first."""


def few_rows(plan: RunPlan) -> list[str]:
    """A note where a model is to be trained on a real device with the small files that come with llmsuite."""
    if isinstance(plan.train_file, Url):
        return []
    path = plan.train_file.resolve()
    if not plan.stage.trains or plan.device.name == "cpu" or not path.is_relative_to(bundled("data").resolve()):
        return []
    if not is_file(path):
        return []
    given, size = plan.recipe.__dict__["data"].__dict__["train"], path.stat().st_size / 1e3
    return [f"data.train: {given} is a sample of {size:.0f} kB; name your own data, or hf:ORG/NAME, before a real run"]


def held_out(plan: RunPlan) -> list[str]:
    """A note for each directory to train on that has files to evaluate on beside others, as all of it is read."""
    if not plan.stage.trains:
        return []
    data = plan.recipe.__dict__["data"].__dict__
    named = [("data.train", data["train"]), *(("data.mix", name) for name in mixed_names(plan.recipe))]
    notes = []
    for key, given in named:
        files = [] if is_remote(given) else _files_in(find(given))
        held = sorted((file for file in files if _rank(file) is not None), key=lambda file: (_rank(file) or 0, file))
        others = [file for file in files if file not in held]
        if held and others:
            names = " and ".join(file.name for file in held)
            notes.append(
                f"{key}: {given} is read whole, so that the run trains on {names} too; "
                f"{_way(key, Path(given), held, others, data['eval'])}"
            )
    return notes


def endless_warm_up(plan: RunPlan) -> list[str]:
    """A note where the learning rate is still rising at the last step."""
    if not plan.stage.trains:
        return []
    train = plan.recipe.__dict__["train"].__dict__
    steps, warm = train["max_steps"], train["warmup_steps"]
    if steps is None or warm is None or warm < steps:
        return []
    return [f"train.warmup_steps: is {warm}, and train.max_steps {steps}, so that the learning rate rises to the end"]


def _files_in(directory: Path) -> list[Path]:
    try:
        return data_files(directory) if is_dir(directory) else []
    except (UserError, OSError):  # a run tells
        return []


def _rank(file: Path) -> int | None:
    """The place in `_HELD_OUT` of what a name begins or ends with; None for others. Numbers of parts do not count."""
    words = re.findall("[a-z]+", re.sub("[0-9]+-of-[0-9]+", "", file.name.partition(".")[0].lower()))
    return min((_HELD_OUT.index(word) for word in (*words[:1], *words[-1:]) if word in _HELD_OUT), default=None)


def _way(key: str, directory: Path, held: Sequence[Path], others: Sequence[Path], evaluation: str | None) -> str:
    if len(others) > 1:
        return "move what is not to train on to another directory"
    train = f"name {directory / others[0].name} there"
    return train if evaluation or key != "data.train" else f"{train}, and {directory / held[0].name} in data.eval"


def not_fetched(plan: RunPlan) -> list[str]:
    """A note for everything that `llmsuite run` would fetch first."""
    notes = []
    for named in hub_names(plan.recipe):
        name = hub_name(named.name)
        if named.want is not Want.ROWS and name is not None and cached(name, named.want, named.kind) is None:
            notes.append(f"{named.key}: {name} is not on this machine; `llmsuite run` fetches it first")
    return notes
