"""Numbers derived from a recipe, and combinations that are rejected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import Problem, RecipeError
from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.conftest import VALID, position, registry_with
from tests.support.train_states import quick_save

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[Problem]]
RECIPES = sorted(bundled("recipes").glob("*/*.json"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_shipped_recipe_plans(path: Path, registry: Registry) -> None:
    plan = plan_run(path, [], registry)
    world = plan.recipe.launch.num_devices * plan.recipe.launch.nnodes
    assert plan.parallel.degrees.num_ranks == world
    if not plan.train.stage.trains:
        return
    if plan.train.stage.trains:
        samples = (
            plan.train.section.micro_batch_size * plan.parallel.accumulate_steps * plan.parallel.degrees.num_data_ranks
        )
        assert samples == plan.train.section.global_batch_size


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--qat.weight_bits=8", "is true, but qat rounds the weights of each layer separately; set it to false"),
        ("--reft.rank=2", "is true; it supports training all parameters only, without adapters or interventions"),
    ],
)
def test_projections_that_are_not_fused(word: str, message: str, registry: Registry) -> None:
    words = ["--parallel.tensor_parallel_degree=2", "--parallel.fuse_projections=true", "--engine.mode=dynamic"]
    plan_run(bundled("recipes") / "llama/sft.json", words, registry)
    with pytest.raises(RecipeError, match=message):
        plan_run(bundled("recipes") / "llama/sft.json", [*words, word], registry)


@pytest.mark.parametrize(
    ("num_devices", "nnodes", "tp", "pp", "sharding", "expected"),
    [
        (1, 1, 1, 1, 1, Degrees(pp=1, dp=1, sharding=1, tp=1)),
        (8, 1, 2, 2, 1, Degrees(pp=2, dp=2, sharding=1, tp=2)),
        (8, 1, 2, 2, 2, Degrees(pp=2, dp=1, sharding=2, tp=2)),
        (8, 2, 2, 1, 4, Degrees(pp=1, dp=2, sharding=4, tp=2)),
    ],
)
def test_degrees_follow_from_devices_and_keys(
    plan: Plan, num_devices: int, nnodes: int, tp: int, pp: int, sharding: int, expected: Degrees
) -> None:
    parallel = {"tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "sharding_parallel_degree": sharding}
    launch = {"num_devices": num_devices, "nnodes": nnodes}
    stage = "stage1" if sharding > 1 else "none"
    found = plan(
        {"parallel": {**parallel, "sharding": stage}, "launch": launch, "train.global_batch_size": 64}
    ).parallel.degrees
    assert found == expected
    assert found.num_ranks == num_devices * nnodes
    assert found.num_data_ranks == expected.dp * sharding


def test_degrees_as_text() -> None:
    assert str(Degrees(pp=1, dp=2, sharding=3, tp=4)) == "pp1 dp2 sharding3 tp4"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.json"
    path.write_text(json.dumps(VALID))
    return path


DEGREE = st.sampled_from([1, 1, 2, 3, 4])


@settings(max_examples=200)
@given(st.integers(1, 24), DEGREE, DEGREE, DEGREE, st.integers(1, 4), st.integers(1, 48))
def test_numbers_agree_or_are_refused(
    file: Path, registry: Registry, world: int, tp: int, pp: int, sharding: int, micro: int, batch: int
) -> None:
    overrides = {
        "launch.num_devices": world,
        "parallel.tensor_parallel_degree": tp,
        "parallel.pipeline_parallel_degree": pp,
        "parallel.sharding_parallel_degree": sharding,
        "parallel.sharding": "stage2" if sharding > 1 else "none",
        "train.micro_batch_size": micro,
        "train.global_batch_size": batch,
    }
    words = [f"--{key}={value}" for key, value in overrides.items()]
    divides_heads = 32 % tp == 0
    divides_world = world % (tp * pp * sharding) == 0
    data_ranks = world // (tp * pp)
    if divides_heads and divides_world and batch % (micro * data_ranks) == 0:
        plan = plan_run(file, words, registry)
        assert plan.parallel.degrees == Degrees(pp, data_ranks // sharding, sharding, tp)
        assert plan.parallel.accumulate_steps * micro * data_ranks == batch
        return
    with pytest.raises(RecipeError) as caught:
        plan_run(file, words, registry)
    expected = [] if divides_heads else ["parallel.tensor_parallel_degree"]
    if not divides_world:
        expected.append("launch.num_devices")
    elif batch % (micro * data_ranks):
        expected.append("train.global_batch_size")
    assert sorted({p.key for p in caught.value.problems}) == sorted(expected)


def test_accumulate_steps_follow_from_batch_sizes(plan: Plan) -> None:
    found = plan({"launch.num_devices": 2, "train.global_batch_size": 24, "train.micro_batch_size": 3})
    assert (found.parallel.degrees.dp, found.parallel.accumulate_steps) == (2, 4)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        (
            {"launch.num_devices": 6, "parallel.tensor_parallel_degree": 4},
            "launch.num_devices",
            "6 devices cannot hold tensor 4 x pipeline 1 x sharding 1 = 4 ranks; use a multiple of 4",
        ),
        (
            {"launch.num_devices": 1, "parallel.pipeline_parallel_degree": 2},
            "launch.num_devices",
            "1 devices cannot hold tensor 1 x pipeline 2 x sharding 1 = 2 ranks; use a multiple of 2",
        ),
        (
            {"launch": {"num_devices": 2, "nnodes": 2}, "train.global_batch_size": 12},
            "train.global_batch_size",
            "is 12; it has to be a multiple of micro_batch_size 2 x data ranks 4 = 8",
        ),
        *(
            (
                {"launch.num_devices": 2, "parallel": {"tensor_parallel_degree": 2, "fuse_projections": True}, **more},
                "parallel.fuse_projections",
                message,
            )
            for more, message in (
                (
                    {"engine.mode": "to_static"},
                    "is true, but compiled layers reduce these gradients in one all-reduce in any case; set it to "
                    "false",
                ),
                (
                    {"lora.rank": 2},
                    "is true; it supports training all parameters only, without adapters or interventions; set it to "
                    "false",
                ),
            )
        ),
        (
            {"lora.rank": 2, "lora.base_dtype": "nf4", "engine.mode": "to_static"},
            "lora.base_dtype",
            "is nf4, which to_static does not support; set engine.mode to dynamic",
        ),
        (
            {
                "parallel.tensor_parallel_degree": 8,
                "launch.num_devices": 8,
                "lora": {"rank": 2, "base_dtype": "llm_int8"},
            },
            "lora.base_dtype",
            "is llm_int8, whose outliers are of all inputs and rows of a product; set parallel.tensor_parallel_degree "
            "to 1",
        ),
        (
            {"lora.rank": 2, "lora.base_dtype": "int8", "lora.base_block": 48},
            "lora.base_block",
            "is 48, which does not divide the 4096 inputs of model.layers.0.self_attn.q_proj; use 16",
        ),
        (
            {
                "parallel.tensor_parallel_degree": 8,
                "launch.num_devices": 8,
                "lora": {"rank": 2, "base_dtype": "fp4", "base_block": 64},
            },
            "lora.base_block",
            "is 64, which does not divide the 11008 inputs of model.layers.0.mlp.down_proj, 1376 on each of 8 ranks; "
            "use 32",
        ),
        (
            {
                "model": {"family": "deepseek", "preset": "deepseek-v2-lite", "tokenizer": "t"},
                "lora": {"rank": 2, "method": "vera", "target_modules": ["q_proj", "down_proj"]},
            },
            "lora.target_modules",
            "'down_proj' matches routed experts (model.layers.1.mlp.experts.down_proj), and lora.method is vera: its "
            "two frozen factors are shared by all matrices, but each expert would keep a copy; set lora.method to "
            "lora, or name other modules, such as shared_experts.* and self_attn.*",
        ),
        (
            {"lora": {"rank": 2, "init": "lora_ga", "target_modules": ["embed_tokens"]}},
            "lora.target_modules",
            "'embed_tokens' matches the embedding (model.embed_tokens), and lora.init is lora_ga: the gradient of an "
            "embedding has rows only for the tokens of the first batches; set lora.init to default, or name other "
            "modules, such as self_attn.*",
        ),
        (
            {"model.config": {"tie_word_embeddings": True}, "lora": {"rank": 2, "target_modules": ["lm_head"]}},
            "lora.target_modules",
            "'lm_head' is the embedding or the head, which are one matrix in this model (tie_word_embeddings); an "
            "adapter supports only one of them; remove it",
        ),
        (
            {"lora": {"rank": 2, "modules_to_save": ["embed_tokens", "norm"]}},
            "lora.modules_to_save",
            "'norm' is neither the embedding (model.embed_tokens) nor lm_head; other modules are not trained in full "
            "next to adapters: remove it",
        ),
        (
            {"lora": {"rank": 2, "modules_to_save": []}},
            "lora.modules_to_save",
            "is empty; name modules, or remove it",
        ),
        (
            {"lora": {"rank": 2, "ensure_weight_tying": True}},
            "lora.ensure_weight_tying",
            "has no effect while modules_to_save is null; set that too, or remove it",
        ),
        (
            {"model.config": {"tie_word_embeddings": True}, "lora": {"rank": 2, "modules_to_save": ["lm_head"]}},
            "lora.modules_to_save",
            "names lm_head, but embedding and head are one matrix in this model (tie_word_embeddings), and one of them "
            "would not follow the other; set lora.ensure_weight_tying to true, which trains the matrix of both",
        ),
        (
            {"lora": {"rank": 2, "modules_to_save": ["lm_head"], "target_modules": ["q_proj", "lm_head"]}},
            "lora.target_modules",
            "'lm_head' matches lm_head, which lora.modules_to_save trains in full; remove one of the two",
        ),
        (
            {"lora": {"rank": 2, "modules_to_save": ["lm_head"], "init": "lora_ga"}},
            "lora.modules_to_save",
            "is set, and lora.init is lora_ga, which has gradients of matrices with adapters only; remove one",
        ),
        (
            {"lora.rank": 2, "lora.base_block": 32},
            "lora.base_block",
            "has no effect while base_dtype is null; set that too, or remove it",
        ),
        (
            {"lora.rank": 2, "lora.base_double_quant": True},
            "lora.base_double_quant",
            "has no effect while base_dtype is null; set that too, or remove it",
        ),
        (
            {"lora": {"rank": 2, "base_dtype": "int8", "base_double_quant": True}},
            "lora.base_double_quant",
            "is true, but base_dtype is int8; set that to nf4 or fp4, or this to false",
        ),
        (
            {"lora": {"rank": 2, "base_dtype": "llm_int8", "base_double_quant": True}},
            "lora.base_double_quant",
            "is true, but base_dtype is llm_int8; set that to nf4 or fp4, or this to false",
        ),
        (
            {"lora": {"rank": 2, "base_dtype": "llm_int8", "base_block": 32}},
            "lora.base_block",
            "has no effect with base_dtype llm_int8, whose blocks are all inputs; remove it",
        ),
        (
            {"lora": {"rank": 2, "base_dtype": "nf4", "base_block": 5}},
            "lora.base_block",
            "is 5; it has to be even, because two 4-bit values share a byte",
        ),
        (
            {"parallel.sharding": "stage1"},
            "parallel.sharding",
            "is stage1, but there is one data rank (pp1 dp1 sharding1 tp1); set it to none",
        ),
        (
            {"parallel.tensor_parallel_degree": 2, "launch.num_devices": 2, "model.config": {"num_key_value_heads": 1}},
            "parallel.tensor_parallel_degree",
            "is 2, which does not divide num_key_value_heads = 1",
        ),
        (
            {"parallel.pipeline_parallel_degree": 3, "launch.num_devices": 3, "model.config": {"num_hidden_layers": 2}},
            "parallel.pipeline_parallel_degree",
            "is 3; the model has 2 layers; use at most 2",
        ),
        (
            {"data.max_length": 2049},
            "data.max_length",
            "is 2049; the model has at most 2048 positions (max_position_embeddings)",
        ),
        (
            {"model.config": {"hidden_size": 33}},
            "model.config.hidden_size",
            "is 33, not a multiple of num_attention_heads = 32",
        ),
        (
            {"launch": {"nnodes": 2, "node_rank": 2}},
            "launch.node_rank",
            "is 2; with nnodes 2 it is at most 1",
        ),
        ({"launch.master": "host"}, "launch.master", "is 'host'; it has to be host:port"),
        ({"device": "cup"}, "device", "no device is called 'cup'; did you mean 'cpu'? registered: cpu, gpu, xpu"),
        ({"engine.precision": "fp16"}, "engine.precision", "is fp16, which cpu does not support; use fp32, bf16"),
        ({"data.format": "trl"}, "data.format", "no data format is called 'trl'"),
        ({"loggers": ["visualdl", "visaldl"]}, "loggers", "no logger is called 'visaldl'; did you mean 'visualdl'?"),
    ],
)
def test_an_illegal_combination_is_refused(
    problems: Problems, tmp_path: Path, changes: dict[str, Any], key: str, message: str
) -> None:
    (problem,) = problems(changes)
    assert problem.key == key
    assert problem.message.startswith(message)
    assert problem.where == position(tmp_path / "recipe.json", f'"{key.rpartition(".")[2]}":')


def test_violated_rules_are_reported_together_in_the_order_of_the_file(problems: Problems) -> None:
    changes = {"device": "cup", "data.max_length": 4096, "parallel.tensor_parallel_degree": 3, "data.format": "x"}
    keys = ["data.max_length", "data.format", "launch.num_devices", "device", *["parallel.tensor_parallel_degree"] * 3]
    found = problems({"launch.num_devices": 4, **changes})
    assert [p.key for p in found] == keys


@pytest.mark.parametrize(
    ("changes", "data_ranks"),
    [({"launch.num_devices": 2}, 2), ({"launch.num_devices": 2, "parallel.sharding_parallel_degree": 2}, 2)],
)
def test_sharding_needs_something_to_cut_over(plan: Plan, changes: dict[str, Any], data_ranks: int) -> None:
    degrees = plan({"parallel.sharding": "stage3", **changes}).parallel.degrees
    # without a degree of its own it takes the data parallel axis
    assert (degrees.num_data_ranks, degrees.sharding, degrees.dp) == (data_ranks, data_ranks, 1)


def test_stage3_needs_to_know_what_is_gathered_at_once(plan: Plan, write_recipe: Callable[..., Path]) -> None:
    changes = {"parallel.sharding": "stage3", "launch.num_devices": 2}
    plan(changes)
    registry = registry_with()
    registry.models["llama"] = dataclasses.replace(registry.models["llama"], shard_plan=None)
    with pytest.raises(RecipeError, match="is stage3; the shard plan of this family names no modules to gather"):
        plan_run(write_recipe(changes), [], registry)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine.recompute": "full"},
        {"parallel.tensor_parallel_degree": 2},
        {"parallel": {"tensor_parallel_degree": 2, "sequence_parallel": True}},
        {"parallel.pipeline_parallel_degree": 2},
        {"parallel": {"pipeline_parallel_degree": 2, "pipeline_schedule": "FThenB"}},
        {"parallel": {"pipeline_parallel_degree": 2, "pipeline_schedule": "interleaved"}},
        {"parallel.sharding": "stage1"},
        {"parallel": {"sharding": "stage2", "sharding_parallel_degree": 2}},
        {"parallel.sharding": "stage3"},
        {"engine.mode": "to_static"},
        {"launch": {"nnodes": 2, "master": "host:1", "node_rank": 1}},
    ],
)
def test_strategies_that_are_legal(plan: Plan, changes: dict[str, Any]) -> None:
    plan({"launch.num_devices": 2, **changes})


# pipelines


def _pipeline(stages: int, **keys: Any) -> dict[str, Any]:
    return {"launch.num_devices": stages, "parallel": {"pipeline_parallel_degree": stages, **keys}}


@pytest.mark.parametrize(
    ("keys", "chunks"),
    [
        ({}, 1),
        ({"virtual_pipeline_degree": 1}, 1),
        ({"pipeline_schedule": "interleaved"}, 2),
        ({"pipeline_schedule": "interleaved", "virtual_pipeline_degree": 8}, 8),
        ({"pipeline_cut": "parameters"}, 1),
        ({"pipeline_cut": [1, 2, 31]}, 1),
        ({"pipeline_schedule": "interleaved", "pipeline_cut": [1, 2, 3, 4, 5, 6, 7]}, 2),
    ],
)
def test_chunks_of_a_rank(plan: Plan, keys: dict[str, Any], chunks: int) -> None:
    found = plan(_pipeline(4, **keys))
    assert found.parallel.num_chunks == chunks
    assert found.parallel.schedule == keys.get("pipeline_schedule", "1F1B")


INTERLEAVED = {"pipeline_schedule": "interleaved"}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        (_pipeline(1, **INTERLEAVED), "pipeline_schedule", "needs pipeline_parallel_degree above 1"),
        (_pipeline(2, **INTERLEAVED, virtual_pipeline_degree=1), "virtual_pipeline_degree", "is the schedule 1F1B"),
        (
            _pipeline(2, virtual_pipeline_degree=2),
            "virtual_pipeline_degree",
            "is 2, but pipeline_schedule 1F1B has one",
        ),
        (
            _pipeline(4, **INTERLEAVED, virtual_pipeline_degree=9),
            "virtual_pipeline_degree",
            "is 9: 4 pipeline stages have 36 chunks, but the model has 32 layers",
        ),
        (_pipeline(1, pipeline_cut="parameters"), "pipeline_cut", "there is no pipeline to split layers over"),
        (
            _pipeline(3, pipeline_cut=[8, 8]),
            "pipeline_cut",
            "is [8, 8]; the layers have to be in increasing order",
        ),
        (
            _pipeline(4, pipeline_cut=[8, 16]),
            "pipeline_cut",
            "names 2 layers; 4 pipeline stages x 1 chunks = 4 parts: name the first layer of each but the first, 3",
        ),
        (_pipeline(2, pipeline_cut=[32]), "pipeline_cut", "names layer 32; the model has layers 0 to 31"),
        (_pipeline(2, pipeline_cut="evenly"), "pipeline_cut", "expected one of: layers, parameters or list"),
    ],
)
def test_pipelines_that_make_no_sense(problems: Problems, changes: dict[str, Any], key: str, message: str) -> None:
    (problem,) = problems(changes)
    assert problem.key.startswith(f"parallel.{key}")
    assert message in problem.message


def test_the_first_part_begins_with_the_first_layer(problems: Problems) -> None:
    found = [str(problem) for problem in problems(_pipeline(2, pipeline_cut=[0]))]
    assert any("parallel.pipeline_cut.0: expected integer > 0, found 0" in problem for problem in found)


def test_a_family_without_a_table_has_no_pipeline(write_recipe: Callable[..., Path]) -> None:
    llama = registry_with().models["llama"]
    registry = registry_with()
    registry.models["llama"] = dataclasses.replace(llama, shard_plan=None)
    with pytest.raises(RecipeError, match="the shard plan of this family names no layers to split"):
        plan_run(write_recipe(_pipeline(2)), [], registry)


def test_a_cut_from_the_command_line(plan: Plan) -> None:
    found = plan(_pipeline(3), "--parallel.pipeline_cut=[10, 20]")
    assert found.recipe.parallel.pipeline_cut == [10, 20]
    assert plan(_pipeline(3), "--parallel.pipeline_cut=parameters").recipe.parallel.pipeline_cut == "parameters"


def test_the_best_evaluation_needs_an_evaluation(problems: Problems) -> None:
    (problem,) = problems({"checkpoint.best_metric": "eval/loss"})
    assert problem.key == "checkpoint.best_metric"
    assert "set data.eval" in problem.message


def test_a_run_as_weights_stands_for_its_newest_checkpoint(plan: Plan, tmp_path: Path) -> None:
    quick_save(tmp_path / "run/checkpoints", 3)
    quick_save(tmp_path / "run/checkpoints", 12)
    changes = {"model": {"family": "llama", "weights": str(tmp_path / "run")}, "data.max_length": 64}
    found = plan(changes)
    assert found.model.weights == found.model.tokenizer == tmp_path / "run/checkpoints/step-12"


@pytest.mark.parametrize(
    ("device", "keys", "fused"),
    [
        ("gpu", {}, True),
        ("xpu", {}, True),
        ("cpu", {}, False),  # it sends nothing while it computes
        ("gpu", {"engine.mode": "to_static"}, False),
        ("gpu", {"reft.rank": "2"}, False),
        ("gpu", {"qat.weight_bits": "8"}, False),
        ("gpu", {"parallel.tensor_parallel_degree": "1", "parallel.sequence_parallel": "false"}, False),
        ("gpu", {"parallel.fuse_projections": "false"}, False),
        ("cpu", {"parallel.fuse_projections": "true"}, True),
    ],
)
def test_where_projections_are_fused(device: str, keys: dict[str, str], fused: bool, registry: Registry) -> None:
    given = {"device": device, "parallel.tensor_parallel_degree": "2", "engine.mode": "dynamic", **keys}
    words = [f"--{key}={value}" for key, value in given.items()]
    plan = plan_run(bundled("recipes") / "llama/sft.json", words, registry)
    assert plan.parallel.fuses_projections is fused
