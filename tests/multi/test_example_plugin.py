"""The example package is installed by pip and its stage trains, resumes and obeys the rules of recipes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.conftest import Runner
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "next_token_stage"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory the example package is installed into."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(EXAMPLE)], check=True)
    return target


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recipe")
    rows = [{"text": f"{i} plus {i} is {2 * i}."} for i in range(50)]
    (directory / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "stage": "next_token",
        "model": {
            "family": "llama",
            "tokenizer": "data/tokenizer",
            "config": {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2},
        },
        "data": {"train": str(directory / "text.jsonl"), "max_length": 64},
        "train": {"max_steps": 30, "global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 0.01},
        "next_token": {"min_tokens": 3},
        "output_dir": str(directory / "run"),
    }  # fmt: skip
    (directory / "recipe.json").write_text(json.dumps(data, indent=1))
    return directory / "recipe.json"


def test_is_under_eighty_lines() -> None:
    package = EXAMPLE / "llmsuite_next_token"
    assert sum(len(file.read_text().splitlines()) for file in package.glob("*.py")) < 80


def test_is_listed_once_installed(runner: Runner, site: Path) -> None:
    plugins = {"PYTHONPATH": str(site), "LLMSUITE_PLUGINS": "next_token"}
    listed = runner.run("plugins", "list", **plugins)
    assert "next_token  llmsuite-next-token 0.1.0  ok  stage next_token, data format next_token_text" in listed
    assert "next_token" in runner.run("list", "stages", **plugins)
    assert "next_token" not in runner.run("list", "stages", PYTHONPATH=str(site))  # not on the allow-list


@pytest.mark.further
def test_it_keeps_the_contract(site: Path, recipe: Path, tmp_path: Path) -> None:
    """By the test that docs/guide/plugins.md gives its author."""
    page = (ROOT / "docs" / "guide" / "plugins.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "assert_stage_contract" in b)
    (tmp_path / "test_contract.py").write_text(block)
    shutil.copy(recipe.parent / "text.jsonl", tmp_path / "rows.jsonl")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "LLMSUITE_PLUGINS": "next_token",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_contract.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_its_numbers_are_those_of_one_process_on_any_mesh(runner: Runner, site: Path, recipe: Path) -> None:
    """It asks the model for logits and gives them to Paddle's cross-entropy, as on one card."""
    plugins = {"PYTHONPATH": str(site), "LLMSUITE_PLUGINS": "next_token"}
    found = []
    for ranks, parallel in (1, {}), (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}):
        directory = recipe.parent / f"on {ranks}"
        words = [f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}", f"--output_dir={directory}"]
        sgd = ["--train.max_steps=4", "--train.optimizer=sgd", "--train.learning_rate=0.5"]
        runner.run("run", str(recipe), *words, *sgd, **plugins)
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        found.append([record[key] for record in map(json.loads, lines) for key in ("loss", "grad_norm")])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[0][-2] < 0.95 * found[0][0], "nothing was learnt, so nothing was compared"


def test_without_the_plugin_the_recipe_says_what_is_missing(runner: Runner, recipe: Path) -> None:
    output = runner.run("validate", str(recipe), expect=2)
    assert "recipe.json:2:2: stage: no stage is called 'next_token'" in output


def test_its_keys_are_checked_like_any_other(runner: Runner, site: Path, recipe: Path) -> None:
    plugins = {"PYTHONPATH": str(site), "LLMSUITE_PLUGINS": "next_token"}
    output = runner.run("validate", str(recipe), "--next_token.min_token=4", expect=2, **plugins)
    assert "--next_token.min_token=4: next_token.min_token: unknown key; did you mean 'min_tokens'?" in output


def test_plugin_of_the_guide_works(runner: Runner, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guide" / "plugins.md").read_text(encoding="utf-8")
    for language, comment in (("python", "# llmsuite_best_loss.py"), ("toml", "# pyproject.toml")):
        block = next(b for b in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if b.startswith(comment))
        (tmp_path / comment.removeprefix("# ")).write_text(block)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(site), str(tmp_path)], check=True)
    words = runner.smoke("readme", "--launch.num_devices=1", "--parallel={}")
    runner.run(*words, PYTHONPATH=str(site), LLMSUITE_PLUGINS="best_loss")
    best = min((record["loss"], record["step"]) for record in runner.metrics("readme"))
    assert (runner.directory / "readme" / "best.txt").read_text() == f"{best[1]} {best[0]}\n"
