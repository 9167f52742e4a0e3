"""The recipes that come with llmsuite: valid, pinned, written alike, and each says where its numbers are from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text

RECIPES = sorted(bundled("recipes").glob("*/*.json"))


@pytest.fixture(params=RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def recipe(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_is_valid_and_of_its_family(recipe: Path, registry: Registry) -> None:
    assert plan_run(recipe, [], registry).model.family.name == recipe.parent.name


def test_says_where_its_numbers_are_from(recipe: Path) -> None:
    assert len(json.loads(recipe.read_text())["source"]) > 20


def test_pins_strategy_precision_recompute_and_device(recipe: Path) -> None:
    data = json.loads(recipe.read_text())
    if data["device"] == "cpu":  # one process and float32, as everything is by default
        return
    trains = data["stage"] != "infer"
    assert {"precision", *(("recompute", "mode") if trains else ())} <= data["engine"].keys()
    assert "num_devices" in data["launch"]
    degrees = data.get("parallel", {})
    assert degrees or data["launch"]["num_devices"] == 8, "nothing is cut, so it is data parallel on one machine"


WITHOUT_PROGRAMS = {
    *(
        "cohere",
        "glm_moe",
        "gpt_oss",
        "granite_moe",
        "hunyuan",
        "internlm",
        "minimax",
        "ministral",
        "mixtral",
        "starcoder",
    ),
    "qwen_hybrid_moe",
}
"""Families whose steps have not run as programs on a mesh yet."""


def test_every_family_and_every_stage_has_a_recipe_of_step_programs(registry: Registry) -> None:
    recipes = [json.loads(path.read_text(encoding="utf-8")) for path in RECIPES]
    programs = [data for data in recipes if data.get("engine", {}).get("program") == "step"]
    families = {data["model"]["family"] for data in recipes}
    assert {data["model"]["family"] for data in programs} == families - WITHOUT_PROGRAMS
    can = {name for name, stage in registry.stages.items() if "step_programs" in stage.capabilities}
    assert {data["stage"] for data in programs} == can & {data["stage"] for data in recipes}


def test_is_written_like_the_others(recipe: Path) -> None:
    assert recipe.read_text(encoding="utf-8") == recipe_text(json.loads(recipe.read_text(encoding="utf-8")))


def test_output_directories_differ() -> None:
    directories = [json.loads(path.read_text())["output_dir"] for path in RECIPES]
    assert len(set(directories)) == len(directories)


def test_text_of_a_recipe_is_the_recipe() -> None:
    data = {
        "stage": "x",
        "train": {"rate": 3e-05, "names": ["ä" * 30] * 5, "list": [1, 2]},
        "empty": {},
        "name": "1e-05",
    }
    assert json.loads(recipe_text(data)) == data
    assert "3e-5" in recipe_text(data)
