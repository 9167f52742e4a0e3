"""The tool that counts the jobs of other suites that are the same here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmsuite.contract.registry import Registry
from tests.support.suite_files import LISTS, listed, load, outcome, table, without_training
from tests.tools.same_jobs import main

HOW = {"action": "from-axolotl", "under": "examples", "with": ["base_model"]}


def test_it_names_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"swift={tmp_path / 'absent'}"]) == 2
    assert "swift=DIRECTORY: modelscope/ms-swift at 3602360a" in capsys.readouterr().err
    (tmp_path / "swift").mkdir()
    assert main([str(tmp_path / "swift")]) == 2
    assert "312 files differ from those of the list" in capsys.readouterr().err


def test_without_directories_it_shows_the_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    rows = table({path.stem: load(path) for path in LISTS})
    assert capsys.readouterr().out.splitlines()[: len(rows)] == rows


def test_files_that_do_not_train_are_apart(tmp_path: Path) -> None:
    folder = tmp_path / "examples/deep"
    folder.mkdir(parents=True)
    (folder / "train.yaml").write_text("base_model: x\n", encoding="utf-8")
    (folder / "serve.yml").write_text("port: 1\n", encoding="utf-8")
    (folder / "broken.yaml").write_text("a: [1\n", encoding="utf-8")
    (folder / "notes.md").write_text("base_model: x\n", encoding="utf-8")
    assert listed(tmp_path, HOW) == {"examples/deep/train.yaml"}
    assert without_training(tmp_path, HOW) == {"examples/deep/serve.yml", "examples/deep/broken.yaml"}


def test_all_reasons_of_a_file(registry: Registry, tmp_path: Path) -> None:
    """Those of arguments, and the error that ends the conversion."""
    file = tmp_path / "job.yaml"
    values = {"base_model": "google/gemma-2b", "lora_model_dir": "a", "lisa_n_layers": 4}
    file.write_text(json.dumps(values), encoding="utf-8")
    found = outcome("from-axolotl", file, registry, tmp_path / "recipe.json")
    assert [key for key, _ in found.reasons] == ["lora_model_dir", "lisa_n_layers", ""]
    assert found.reasons[-1][1] == "no family for models of type gemma"
