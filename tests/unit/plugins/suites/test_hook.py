"""Suites of third parties: the hook `llmsuite_register_suites`, as the bundled plugin uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.known import SUITES

PLUGIN = """
import json

import llmsuite
from llmsuite.contract.hookspecs import ConvertedRecipe, SuiteSpec


def convert(path, registry, options):
    values = json.loads(path.read_text())
    recipe = {"stage": options.stage or "sft", "model": {"family": "llama", "weights": values.pop("model")}}
    return RETURNED


@llmsuite.hookimpl
def llmsuite_register_suites():
    return [SuiteSpec(name="mine", help="my own suite", convert=convert)]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.json"
    path.write_text('{"model": "somewhere", "verbose": 1}')
    return str(path)


def plugin(directory: Path, returned: str) -> list[str]:
    path = directory / f"mine_{len(returned)}.py"
    path.write_text(PLUGIN.replace("RETURNED", returned))
    return ["--plugin", str(path)]


def test_a_suite_of_a_plugin(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = plugin(tmp_path, "ConvertedRecipe(recipe, left_out=[(*values.popitem(), 'prints only')])")
    assert main([*given, "recipe", "from-mine", file, "--stage", "dpo"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["stage"] == "dpo"
    assert json.loads(captured.out)["model"]["weights"] == "somewhere"
    assert "  verbose = 1: prints only\n" in captured.err
    assert main([*given, "list", "suites"]) == 0
    assert re.search("^mine +my own suite ", capsys.readouterr().out, re.MULTILINE)


def test_a_plugin_that_returns_something_else_is_named(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = plugin(tmp_path, "recipe")
    assert main([*given, "recipe", "from-mine", file]) == 2
    assert capsys.readouterr().err == (
        f"recipe from-mine: convert of plugin {Path(given[1]).stem} returned a dict; it has to return a "
        "ConvertedRecipe\n"
    )


def test_actions_that_do_not_exist(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "from-tlr", file]) == 2
    assert "recipe from-tlr: no suite is called 'tlr'; did you mean 'trl'?" in capsys.readouterr().err
    assert main(["recipe", "trl", file]) == 2
    assert capsys.readouterr().err.startswith("recipe: ACTION: expected one of new, tune, from-paddlenlp, ")
    assert main(["--no-plugins", "recipe", "from-trl", file]) == 2
    assert capsys.readouterr().err == (
        "recipe from-trl: suite 'trl' is in the plugin suites, which --no-plugins leaves out\n"
    )


def test_every_bundled_suite_is_registered(registry: Registry) -> None:
    assert {f"from-{name}" for name in registry.suites} == {"from-paddlenlp", *SUITES}
