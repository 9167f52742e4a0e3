"""Files of other suites: which of them train, and what becomes of each."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.conversion.refuse import NotTheSameJob
from llmsuite.plugins.suites.convert import convert, read_values
from llmsuite.plugins.suites.known import SUITES
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text
from tests.support.paths import ROOT

LISTS = sorted((ROOT / "tests/unit/plugins/suites").glob("*.json"))
"""A list for each suite: the names, digests and outcomes of its files that train, not their text."""
VALID = ("same", "model.weights")
"""Outcomes that are the same job. "model.weights": of a model whose sizes are in its config.json only."""
_SUFFIXES = (".yaml", ".yml", ".sh")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What becomes of a file."""

    text: str
    """One of `VALID`, the keys that keep the recipe from being valid, or the message of the refusal."""
    reasons: Sequence[tuple[str, str]] = ()
    """(argument, reason) of a file that is refused; the argument is empty for an error that is about no argument."""


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def listed(root: Path, how: Mapping[str, Any]) -> set[str]:
    """Names of the files below `how["under"]` that have one of the keys `how["with"]`: those of a list."""
    return {name for name, trains in _trains(root, how).items() if trains}


def without_training(root: Path, how: Mapping[str, Any]) -> set[str]:
    """Names of the other files there: they serve, export or configure, or are scripts with no or several commands."""
    return {name for name, trains in _trains(root, how).items() if not trains}


def _trains(root: Path, how: Mapping[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    suite = SUITES[how["action"]]
    for path in (root / how["under"]).rglob("*"):
        if path.suffix in _SUFFIXES and path.is_file():
            try:
                values = read_values(path, suite)
            except UserError:
                values = {}
            found[str(path.relative_to(root))] = any(values.get(key) for key in how["with"])
    return found


def digest(action: str, path: Path) -> str:
    """sha256 of the values, however they are laid out."""
    return hashlib.sha256(json.dumps(read_values(path, SUITES[action]), sort_keys=True).encode()).hexdigest()


def outcome(action: str, path: Path, registry: Registry, recipe: Path) -> Outcome:
    """What becomes of a file; `recipe` is a file to write to."""
    try:
        made = convert(SUITES[action], read_values(path, SUITES[action]), path.name, registry).recipe
    except UserError as error:
        return Outcome(str(error), _reasons(error, path.name))
    recipe.write_text(recipe_text(made), encoding="utf-8")
    try:
        plan_run(recipe, [], registry)
    except RecipeError as error:
        keys = ", ".join(problem.key for problem in error.problems)
        return Outcome(keys, [(problem.key, problem.message) for problem in error.problems])
    return Outcome("same")


def _reasons(error: UserError, name: str) -> list[tuple[str, str]]:
    """Return (argument, reason) for each reason of a refusal."""
    found: list[tuple[str, str]] = []
    if isinstance(error, NotTheSameJob):
        found = [(key, why) for key, _, why in error.reasons]
        stop = error.stop
    else:
        stop = error
    if stop is not None:
        message = str(stop).removeprefix(f"{name}: ")
        family = re.search(r"of type (.*?), which no family supports", message)
        found.append(("", f"no family for models of type {family[1]}" if family else message))
    return found


def table(lists: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table of docs/guide/from-other-suites.md for the lists by name: its head and a row for each suite."""
    rows = ["| suite | commit | files that train | the same job | refused |", "|---|---|---|---|---|"]
    for found in lists.values():
        same = sum(file["becomes"] in VALID for file in found["files"].values())
        total = len(found["files"])
        commit = found.get("commit", "various")[:8]
        rows.append(f"| {SUITES[found['action']].name} | {commit} | {total} | {same} | {total - same} |")
    return rows
