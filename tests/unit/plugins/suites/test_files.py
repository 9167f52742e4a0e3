"""Every example of another suite that trains: the same job, valid, or refused with the reason.

The lists have names, digests and what becomes of each file, not their text. A variable for each suite names a checkout
at the commit of its list. Where the files of a list are of various commits, each has its own, and the variable names a
directory with each file as it is there. "model.weights" is the same job too, of a model whose sizes are in its
config.json only.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.convert import convert, read_values
from llmsuite.plugins.suites.known import SUITES
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text
from tests.support.paths import ROOT

LISTS = sorted(Path(__file__).parent.glob("*.json"))
VALID = ("same", "model.weights")


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def listed(root: Path, how: Mapping[str, Any]) -> set[str]:
    """Names of the files below `how["under"]` that have one of the keys `how["with"]`: those of a list."""
    found = set()
    suite = SUITES[how["action"]]
    for path in (root / how["under"]).rglob("*"):
        if path.suffix in (".yaml", ".yml", ".sh"):
            try:
                values = read_values(path, suite)
            except UserError:
                continue
            if any(values.get(key) for key in how["with"]):
                found.add(str(path.relative_to(root)))
    return found


def digest(action: str, path: Path) -> str:
    """sha256 of the values, however they are laid out."""
    return hashlib.sha256(json.dumps(read_values(path, SUITES[action]), sort_keys=True).encode()).hexdigest()


def outcome(action: str, path: Path, registry: Registry, recipe: Path) -> str:
    """One of `VALID`, the keys that keep the recipe from being valid, or the reason of the refusal."""
    try:
        made = convert(SUITES[action], read_values(path, SUITES[action]), path.name, registry).recipe
    except UserError as error:
        return str(error)
    recipe.write_text(recipe_text(made), encoding="utf-8")
    try:
        plan_run(recipe, [], registry)
    except RecipeError as error:
        return ", ".join(problem.key for problem in error.problems)
    return "same"


def test_every_suite_has_a_list_of_files() -> None:
    assert {load(path)["action"] for path in LISTS} == set(SUITES)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_the_documentation_has_the_counts(path: Path) -> None:
    found = load(path)
    counts = collections.Counter(file["becomes"] in VALID for file in found["files"].values())
    text = (ROOT / "docs/guide/from-other-suites.md").read_text(encoding="utf-8")
    name = SUITES[found["action"]].name
    commit = found.get("commit", "various")[:8]
    assert f"| {name} | {commit} | {len(found['files'])} | {counts[True]} | {counts[False]} |" in text


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_files(path: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(path)
    variable = f"LLMSUITE_{path.stem.upper()}"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    root = Path(os.environ[variable]).resolve()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no hub: some models' sizes are known, others' not
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(root)  # where their commands are run: data/dataset_info.json is read
    files = found["files"]
    assert listed(root, found) == set(files)
    others = [name for name in files if digest(found["action"], root / name) != files[name]["sha256"]]
    assert {name: files[name].get("commit", found.get("commit")) for name in others} == {}
    results = {name: outcome(found["action"], root / name, registry, tmp_path / "recipe.json") for name in files}
    wrong = {name: result for name, result in results.items() if files[name]["becomes"] not in result}
    assert wrong == {}
