"""Rules about the Python files that a recipe may name."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmsuite
from llmsuite.base.errors import Problem, RecipeError
from llmsuite.cli.main import main
from tests.support.paths import ROOT

_KEYS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "reward.functions": ("grpo", "reward", lambda file: {"functions": {f"{file}:found": 1.0}}),
    "environment.name": ("grpo", "environment", lambda file: {"name": f"{file}:Found"}),
    "environment.verifiers.id": ("grpo", "environment", lambda file: {"name": "verifiers", "verifiers": {"id": file}}),
    "data.collator": ("sft", "data", lambda file: {"collator": f"{file}:collated"}),
}
_CODE = """
def found(completions): return [0.0 for c in completions]
class Found: pass
def load_environment(): pass
def collated(samples, collate): return collate(samples)
raise SystemExit("this file was run")
"""


class Home:
    """A recipe in one directory, code in another, and a third one to work in."""

    def __init__(self, directory: Path, key: str):
        self.recipes, self.strange, self.own = (directory / name for name in ("recipes", "strange", "own"))
        for made in (self.recipes, self.strange, self.own):
            made.mkdir()
        self.key = key

    def code(self, directory: Path) -> Path:
        """A file with code."""
        file = directory / "code_of_somebody.py"
        file.write_text(_CODE)
        return file

    def recipe(self, file: Path | str) -> Path:
        """A recipe that names a file."""
        stage, section, value = _KEYS[self.key]
        recipe = json.loads((ROOT / "recipes" / "llama" / f"{stage}.json").read_text())
        recipe[section] = {**recipe.get(section, {}), **value(str(file))}
        path = self.recipes / "recipe.json"
        path.write_text(json.dumps(recipe))
        return path


@pytest.fixture(params=_KEYS)
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home(tmp_path, request.param)
    monkeypatch.chdir(made.own)
    return made


def _refused(home: Home, recipe: Path | dict[str, Any], *words: str) -> bool:
    """Return True if a check of a recipe complains about its code. It may complain of weights and data, which are not
    there, and of nothing else."""
    problems: list[Problem] = []
    try:
        llmsuite.load_recipe(recipe, _given(words))
    except RecipeError as error:
        problems = error.problems
    assert {problem.key for problem in problems} <= {home.key, "model.weights", "data.train", "data.eval"}, problems
    about = [problem.message for problem in problems if problem.key == home.key]
    assert all(message.startswith("names code in") for message in about), about
    return bool(about)


def _given(words: tuple[str, ...]) -> dict[str, Any]:
    return {key: json.loads(value) for key, _, value in (word.partition("=") for word in words)}


def test_a_file_of_a_stranger_is_refused(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = home.recipe(home.code(home.strange))
    assert _refused(home, recipe)
    assert main(["validate", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert f"{home.key}: names code in {home.strange}/code_of_somebody.py, which would be executed" in said
    assert "this file was run" not in said


def test_a_link_to_a_file_of_a_stranger_is_refused(home: Home) -> None:
    link = home.recipes / "linked.py"
    link.symlink_to(home.code(home.strange))
    assert _refused(home, home.recipe(link))


def test_a_path_that_leads_out_is_refused(home: Home) -> None:
    home.code(home.strange)
    assert _refused(home, home.recipe(f"{home.recipes}/../strange/code_of_somebody.py"))


@pytest.mark.parametrize("where", ["recipes", "own"])
def test_a_file_next_to_the_recipe_or_in_the_working_directory_is_allowed(home: Home, where: str) -> None:
    assert not _refused(home, home.recipe(home.code(getattr(home, where))))


def test_a_relative_file_is_taken(home: Home) -> None:
    home.code(home.own)
    assert not _refused(home, home.recipe("code_of_somebody.py"))


def test_a_file_that_was_allowed_is_taken(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = home.recipe(home.code(home.strange))
    main(["validate", str(recipe), "--allow-code"])
    assert "names code in" not in capsys.readouterr().err
    assert _refused(home, recipe), "it is allowed for one command"


def test_a_file_that_the_command_line_names_is_taken(home: Home) -> None:
    file = home.code(home.strange)
    stage, section, value = _KEYS[home.key]
    name, given = next(iter(value(str(file)).items()))
    if home.key == "environment.verifiers.id":
        words = ('environment.name="verifiers"', f'environment.verifiers.id="{file}"')
    else:
        words = (f"{section}.{name}={json.dumps(given)}",)
    assert not _refused(home, ROOT / "recipes" / "llama" / f"{stage}.json", *words)


_IMPORTERS = {
    "llmsuite/contract/given.py": "the option --plugin, a word of whoever runs the command",
    "llmsuite/rl/environments.py": "environment.name",
    "llmsuite/rl/reward_worker.py": "reward.functions",
    "llmsuite/rl/verifiers_environment.py": "environment.verifiers.id",
    "llmsuite/engine/collator.py": "data.collator",
}
"""Modules that import a file, and what names it: an option, or a key that `code_files` knows."""


def test_nothing_else_imports_a_file() -> None:
    found = set()
    for path in (ROOT / "llmsuite").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "id", "") or getattr(called, "attr", "")
            is_ours = isinstance(called, ast.Name) and name in ("import_file", "from_file", "exec", "eval")
            if is_ours or name in ("spec_from_file_location", "run_path", "run_module"):
                found.add(path.relative_to(ROOT).as_posix())
    assert found - {"llmsuite/base/python_files.py", "llmsuite/__main__.py"} == {*_IMPORTERS}
    assert {key for key in _IMPORTERS.values() if " " not in key} == {*_KEYS}


def test_a_program_may_name_any_file(home: Home) -> None:
    recipe = json.loads(home.recipe(home.code(home.strange)).read_text())
    assert not _refused(home, recipe)
