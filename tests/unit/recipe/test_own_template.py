"""A chat template in a file: its text becomes a part of the recipe, and of what a resumed run is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.files import write_json
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.engine.run_record import RunRecord
from llmsuite.recipe.load import LoadedRecipe, load
from tests.support.paths import ROOT

TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def written(place: Path, value: str) -> Path:
    recipe = json.loads((ROOT / "recipes" / "llama" / "sft.json").read_text())
    recipe["data"]["chat_template"] = value
    path = place / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


def loaded(place: Path, value: str, registry: Registry) -> LoadedRecipe:
    return load(written(place, value), [], registry)


def test_the_text_of_a_file_next_to_the_recipe_is_recorded(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "own.jinja").write_text(TEXT)
    found = loaded(tmp_path, "templates/own.jinja", registry)
    assert found.recipe.data.chat_template == TEXT
    assert as_plain(found.recipe)["data"]["chat_template"] == TEXT
    # the working directory goes first, as for data
    (tmp_path / "work" / "templates").mkdir(parents=True)
    (tmp_path / "work" / "templates" / "own.jinja").write_text(TEXT + "{{ 1 }}")
    monkeypatch.chdir(tmp_path / "work")
    assert loaded(tmp_path, "templates/own.jinja", registry).recipe.data.chat_template == TEXT + "{{ 1 }}"
    assert loaded(tmp_path, TEXT, registry).recipe.data.chat_template == TEXT


def test_faulty_values_are_named_with_their_place(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(
        RecipeError, match=r"recipe\.json:1:\d+: data\.chat_template: own\.jinja is not there; it is looked"
    ):
        loaded(tmp_path, "own.jinja", registry)
    (tmp_path / "own.jinja").write_text("just words")
    with pytest.raises(RecipeError, match=r"data\.chat_template: .*own\.jinja has no \{\{ … \}\} and no \{% … %\}"):
        loaded(tmp_path, "own.jinja", registry)
    (tmp_path / "own.jinja").write_bytes(b"\xff{{ 1 }}")
    with pytest.raises(RecipeError, match=r"data\.chat_template: .*own\.jinja: cannot be read"):
        loaded(tmp_path, "own.jinja", registry)
    with pytest.raises(RecipeError, match=r"data\.chat_template: there is no 'qwen33'; did you mean 'qwen3'\?"):
        loaded(tmp_path, "qwen33", registry)


def test_a_run_is_not_resumed_with_another_text(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "own.jinja").write_text(TEXT)
    output = tmp_path / "run"
    (output / "checkpoints" / "step-1").mkdir(parents=True)
    write_json(output / "recipe.json", as_plain(loaded(tmp_path, "own.jinja", registry).recipe))
    record = RunRecord.from_recipe(loaded(tmp_path, "own.jinja", registry), output)
    assert record.differing_keys() == []
    (tmp_path / "own.jinja").write_text(TEXT + "{{ eos_token }}")
    with pytest.raises(UserError, match=r"a run that differs in data\.chat_template;"):
        RunRecord.from_recipe(loaded(tmp_path, "own.jinja", registry), output).check()
