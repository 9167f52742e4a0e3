"""Families that place their parameters themselves: the degrees of their runs, what is refused, and shapes without
tokens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.checkpoint.model_dir import read_config
from llmsuite.contract.given import plugin_from_specs
from llmsuite.contract.specs import ModelFamily
from llmsuite.data.tokenizer import NoTokenizer
from llmsuite.models.plain import PlainNames, PlainShape
from llmsuite.models.shard_plan import AUTO_PARALLEL
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.conftest import registry_with
from tests.support.paths import ROOT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(PlainShape):
    model_type: ClassVar[str] = "for_rules"

    width: int = 4
    """Size of a vector."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader(Shape):
    model_type: ClassVar[str] = "reads"

    vocab_size: int = 512
    """Tokens."""


FAMILIES = [
    ModelFamily(
        name=shape.model_type,
        help="for this test",
        config_cls=shape,
        presets={},
        smoke={"width": 4},
        factory=lambda: None,  # type: ignore[arg-type, return-value]
        names=lambda: PlainNames(lambda config: ["w"]),
        shard_plan=AUTO_PARALLEL,
        hf_model_types=(shape.model_type,),
    )
    for shape in (Shape, Reader)
]
REGISTRY = registry_with(own=plugin_from_specs(FAMILIES))


def _plan(write_recipe: Any, *words: str, stage: str = "pretrain", family: str = "for_rules") -> RunPlan:
    changes = {"stage": stage, "model": {"family": family, "config": {"width": 8}}, "launch": {"num_devices": 4}}
    return plan_run(write_recipe(changes), words, REGISTRY)


@pytest.mark.parametrize(("others", "reader"), [([], "no family"), (FAMILIES, "family 'for_rules'")])
def test_checkpoints_are_read_as_of_their_family(write_recipe: Any, others: list[ModelFamily], reader: str) -> None:
    stray = dataclasses.replace(FAMILIES[0], name="stray", hf_model_types=("stray",))
    changes = {"stage": "pretrain", "model": {"family": "stray", "config": {"width": 8}}}
    with pytest.raises(RecipeError, match=f"'stray' would have the model_type 'for_rules', which {reader} reads"):
        plan_run(write_recipe(changes), [], registry_with(own=plugin_from_specs([*others, stray])))
    alike = dataclasses.replace(stray, hf_model_types=FAMILIES[0].hf_model_types)
    plan_run(write_recipe(changes), [], registry_with(own=plugin_from_specs([*others, alike])))


def test_all_ranks_are_one_group_with_the_same_samples(write_recipe: Any) -> None:
    plan = _plan(write_recipe)
    assert plan.parallel.degrees.num_ranks == 4
    assert plan.parallel.degrees.num_data_ranks == 1
    assert plan.parallel.accumulate_steps == 4  # 8 samples, 2 a micro-batch in all
    assert str(plan.parallel.degrees) == "meshes of the model over 4 ranks"


@pytest.mark.parametrize(
    ("word", "key", "why"),
    [
        (
            "--parallel.tensor_parallel_degree=2",
            "parallel.tensor_parallel_degree",
            "is auto-parallel and places its parameters itself",
        ),
        (
            "--parallel.pipeline_parallel_degree=2",
            "parallel.pipeline_parallel_degree",
            "places its parameters itself; remove it",
        ),
        ("--parallel.sharding=stage1", "parallel.sharding", "set it to none, and shard parameters"),
        ("--engine.mode=to_static", "engine.program", "is layers, but the shard plan of the auto-parallel family"),
        ("--engine.recompute=full", "engine.recompute", "is full, which the auto-parallel family for_rules does"),
        ("--engine.precision=bf16", "engine.precision", "set it to fp32"),
        ("--lora.rank=4", "lora.rank", "set it to null"),
        ("--qat.weight_bits=8", "qat.weight_bits", "set it to null"),
    ],
)
def test_unsupported_keys_are_rejected_by_name(write_recipe: Any, word: str, key: str, why: str) -> None:
    with pytest.raises(RecipeError) as found:
        _plan(write_recipe, word)
    (problem,) = [problem for problem in found.value.problems if problem.key == key]
    assert why in problem.message


def test_stages_that_generate_are_refused() -> None:
    words = "--model.family=reads", '--model.config={"width": 8}', "--parallel={}", "--engine.recompute=none"
    with pytest.raises(RecipeError) as found:
        plan_run(ROOT / "recipes/llama/grpo.json", words, REGISTRY, smoke=True)
    assert [problem.key for problem in found.value.problems] == ["stage"]
    assert "is grpo, which has rollouts, which the auto-parallel family reads" in found.value.problems[0].message


def test_a_shape_without_a_vocabulary_needs_no_tokenizer(write_recipe: Any) -> None:
    plan = _plan(write_recipe)
    assert plan.model.tokenizer is None
    plan.check_files()
    with pytest.raises(RecipeError, match=r"is required without model\.weights"):
        _plan(write_recipe, family="reads")


def test_a_stage_that_needs_tokens_is_rejected_without_a_vocabulary() -> None:
    with pytest.raises(UserError, match="its models read no tokens, and this run needs a tokenizer"):
        NoTokenizer().encode("text")


def test_a_plain_shape_comes_back_from_its_config(tmp_path: Path) -> None:
    written = Shape(width=3).to_hf()
    assert written == {"model_type": "for_rules", "width": 3}
    (tmp_path / "config.json").write_text(json.dumps(written))
    family, config = read_config(tmp_path, {family.name: family for family in FAMILIES})
    assert (family.name, config) == ("for_rules", Shape(width=3))


def test_the_page_says_what_is_refused() -> None:
    page = (ROOT / "docs" / "guide" / "auto-parallel.md").read_text("utf-8").partition("## What is refused")[2]
    for key in ("to_static", "recompute", "offload_optimizer", "lora", "reft", "prefix", "qat", "sharding"):
        assert f"`{key}`" in page or f"`engine.mode: {key}`" in page
