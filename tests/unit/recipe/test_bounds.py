"""Recipes that are too much: answered at once, with the first things that are wrong."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.load import load
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.source import MAX_BYTES
from tests.support.paths import ROOT

RECIPE: dict[str, Any] = json.loads((ROOT / "recipes" / "llama" / "sft.json").read_text())


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**RECIPE, **{f"unknown_{i}": i for i in range(9000)}}),
        json.dumps({**RECIPE, "train": {**RECIPE["train"], **{f"learning_rat{i}": i for i in range(7000)}}}),
        json.dumps({**RECIPE, "loggers": list(range(25000))}),
        json.dumps({**RECIPE, "seed": "x" * 190_000}),
        json.dumps({**RECIPE, "model": "x" * 190_000}),
        "[" * 190_000,
        "{" * 190_000,
        '{"a":' * 30_000,
        json.dumps({**RECIPE, "model": {"family": "llama", "config": {f"k{i}": i for i in range(9000)}}}),
    ],
    ids=["unknown", "misspelt", "list", "text", "section", "brackets", "braces", "deep", "config"],
)
def test_much_that_is_wrong_costs_little(tmp_path: Path, registry: Registry, text: str) -> None:
    assert len(text) < MAX_BYTES
    path = written(tmp_path / "recipe.json", text)
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    said = ""
    try:
        load(path, [], registry)
    except UserError as error:
        said = str(error)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun
    assert used < 5, "seconds of the processor, of which a quadratic way would take hundreds"
    assert len(said) < 100_000


def test_files_above_the_size_limit_are_not_read(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(UserError, match="a recipe has at most"):
        load(written(tmp_path / "recipe.json", " " * (MAX_BYTES + 1)), [], registry)
    with pytest.raises(UserError, match="more than 1,000; write a recipe"):
        load(ROOT / "recipes" / "llama" / "sft.json", [f"--a{i}=1" for i in range(30_000)], registry)


@pytest.mark.parametrize(
    ("recipe", "override", "says"),
    [
        ("sft", "--lora.rank=1000000000000000000", "<= 65536"),
        ("sft", "--reft.rank=65537", "<= 65536"),
        ("sft", '--output_dir=""', "has to be the path of a directory"),
        ("sft", "--output_dir=" + "x" * 300, "is too long"),
        ("sft", "--output_dir=" + "x/" * 600, "is too long"),
        ("sft", "--launch.log_dir=" + "x" * 300, "is too long"),
        ("sft", "--launch.master=h:99999", "a port is 1 to 65535"),
        ("sft", "--launch.master=h:0", "a port is 1 to 65535"),
        ("pretrain", '--pretrain.mix={"x": 1e300}', "expected"),
        ("sft", "--train.global_batch_size=1000000000000", "<= 1048576"),
        ("pretrain", "--model.config.num_hidden_layers=100000000", "<= 10000"),
        ("pretrain", "--model.config.eos_token_id=-5", "integer >= 0"),
        ("pretrain", "--model.config.eos_token_id=[1, -5]", "integer >= 0"),
        ("pretrain", "--model.config.bos_token_id=-5", "integer >= 0"),
    ],
)
def test_values_out_of_range_are_rejected(registry: Registry, recipe: str, override: str, says: str) -> None:
    with pytest.raises(RecipeError) as found:
        load(ROOT / "recipes" / "llama" / f"{recipe}.json", [override], registry)
    assert says in str(found.value)


def test_a_path_has_no_zero_byte(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(RecipeError, match="has to be the path of a directory"):
        load(written(tmp_path / "recipe.json", json.dumps({**RECIPE, "output_dir": "a\0b"})), [], registry)


@pytest.mark.parametrize(
    ("stage", "words", "says"),
    [
        ("pretrain", ["--data.packing=best_fit"], "data.packing: is best_fit; stage pretrain does not pack samples"),
        ("pretrain", ['--data.mix={"more.jsonl": 1.0}'], "data.mix: has no effect in stage pretrain"),
        ("kto", ["--data.packing=best_fit"], "stage kto does not pack samples"),
        ("grpo", ["--data.packing=best_fit"], "stage grpo does not pack samples"),
    ],
)
def test_keys_without_effect_are_rejected(registry: Registry, stage: str, words: list[str], says: str) -> None:
    with pytest.raises(RecipeError) as found:
        plan_run(ROOT / "recipes" / "llama" / f"{stage}.json", words, registry)
    assert says in str(found.value)


@pytest.mark.parametrize("steps", [5, "epoch"])
def test_nothing_to_evaluate_on_is_refused(tmp_path: Path, registry: Registry, steps: int | str) -> None:
    recipe = json.loads((ROOT / "recipes" / "llama" / "sft.json").read_text(encoding="utf-8"))
    recipe["train"]["eval_steps"] = steps
    del recipe["data"]["eval"]
    path = written(tmp_path / "recipe.json", json.dumps(recipe))
    with pytest.raises(RecipeError, match=f"train.eval_steps: is {steps}, but there is no evaluation data"):
        plan_run(path, [], registry)
    # which says that nothing is, as a command line does of a recipe that evaluates
    assert plan_run(path, ["--data.eval=null"], registry).recipe.train.eval_steps == steps


def test_evaluation_by_a_split_is_one(registry: Registry) -> None:
    words = ["--train.eval_steps=5", "--pretrain.split=9,1", "--data.train=data/none.idx"]
    assert plan_run(ROOT / "recipes" / "llama" / "pretrain.json", words, registry).recipe.train.eval_steps == 5
