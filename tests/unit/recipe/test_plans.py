"""The plans of model, data, parallelism and training that a recipe is resolved to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.support.paths import DATA, ROOT


def plan_of(registry: Registry, recipe: str, *words: str) -> RunPlan:
    return plan_run(ROOT / "recipes" / "llama" / f"{recipe}.json", words, registry, smoke=True)


@pytest.mark.parametrize("plan", [ModelPlan, DataPlan, ParallelPlan, TrainPlan])
def test_a_part_has_no_recipe(plan: Any) -> None:
    for field in dataclasses.fields(plan):
        assert "Recipe" not in str(field.type), field.name


def test_the_parts_share_the_sections_of_the_recipe(registry: Registry) -> None:
    """So a key that a component reads counts as read in the recipe."""
    plan = plan_of(registry, "grpo")
    recipe: Any = plan.recipe
    assert plan.model.section is recipe.model
    assert plan.data.section is recipe.data
    assert plan.parallel.section is recipe.parallel
    assert plan.parallel.engine is recipe.engine
    assert plan.train.section is recipe.train
    assert plan.train.stage_section is recipe.grpo
    assert plan.train.rollout is recipe.rollout
    assert plan.train.reward is recipe.reward


def test_only_prompts_are_read_for_inference(registry: Registry) -> None:
    plan = plan_of(registry, "infer")
    assert [key for key, _, _ in plan.data.files()] == ["data.prompts"]
    assert plan.data.eval_paths == {}
    assert plan.parallel.accumulate_steps is None


def test_all_data_are_listed_with_their_keys(registry: Registry) -> None:
    other = DATA / "sft" / "train.jsonl"
    plan = plan_of(registry, "sft", f'--data.mix={{"{other}": 0.5}}', f"--data.eval={other}")
    assert [key for key, _, _ in plan.data.files()] == ["data.train", "data.eval", "data.mix"]
    assert [path for *_, path in plan.data.files()][1:] == [other, other]


@pytest.mark.parametrize(
    ("words", "keeps"),
    [
        (("--engine.precision=bf16",), True),
        (("--engine.precision=fp32",), False),
        (("--engine.precision=bf16", "--lora.method=dora"), False),
        (("--engine.precision=bf16", "--lora.base_dtype=nf4"), False),
    ],
)
def test_frozen_matrices_are_bf16_where_only_products_read_them(
    registry: Registry, words: tuple[str, ...], keeps: bool
) -> None:
    plan = plan_of(registry, "lora", *words)
    assert plan.model.is_frozen
    assert plan.model.keeps_frozen_bf16(plan.parallel) is keeps


def test_a_sample_has_the_rows_of_its_stage(registry: Registry) -> None:
    assert plan_of(registry, "sft").train.rows_per_sample == 1
    assert plan_of(registry, "dpo").train.rows_per_sample == 2
    assert plan_of(registry, "grpo", "--rollout.num_generations=3").train.rows_per_sample == 3
