"""Features that compiled training steps do not support are rejected by name."""

from __future__ import annotations

import json

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.support.paths import ROOT

STEP = ("--engine.mode=to_static", "--engine.program=step")
PP2 = '--parallel={"pipeline_parallel_degree":2}'
SIXTEEN_BITS = ("cpu", "bf16"), ("gpu", "bf16"), ("gpu", "fp16")
PLAIN = ("--parallel={}", "--launch.num_devices=1", "--engine.recompute=none", *STEP)


def _plan(registry: Registry, recipe: str, *words: str) -> RunPlan:
    given = {word.partition("=")[0]: word for word in (*PLAIN, *words)}
    return plan_run(ROOT / f"recipes/{recipe}.json", list(given.values()), registry, smoke=True)


@pytest.mark.parametrize(
    "recipe",
    [
        "llama/sft",
        "llama/pretrain",
        "qwen/sft",
        "gpt/pretrain",
        "ernie/sft",
        "llama/lora",
        "qwen/lora",
        "llama/dpo",
        "llama/orpo",
        "llama/rm",
        "llama/kto",
        "qwen_moe/pretrain",
        "ernie_moe/sft",
        "deepseek/lora",
        "deepseek/kto",
    ],
)
def test_supported_recipes_compile_steps(registry: Registry, recipe: str) -> None:
    assert _plan(registry, recipe).recipe.engine.compiles_steps


def test_with_experts_on_all_data_ranks(registry: Registry) -> None:
    parallel = '--parallel={"tensor_parallel_degree":2,"expert_parallel_degree":4,"sharding":"stage1"}'
    assert _plan(registry, "ernie_moe/sft", "--launch.num_devices=8", parallel).parallel.degrees.ep == 4


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("llama/sft", ["--engine.recompute=selective"]),
        ("llama/sft", ["--qat.weight_bits=8"]),
        ("llama/sft", ["--reft.rank=4"]),
        ("llama/sft", ["--prefix.tokens=4", "--prefix.projection=true"]),
        ("llama/dpo", ["--data.packing=best_fit"]),
        ("llama/rm", ["--data.packing=best_fit"]),
    ],
)
def test_further_keys(registry: Registry, recipe: str, words: list[str]) -> None:
    assert _plan(registry, recipe, *words).recipe.engine.compiles_steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--engine.recompute=selective"],
            "engine.recompute: is selective, but to_static compiles full layers; .* engine.program step, or engine",
        ),
        (["--reft.rank=4"], "reft.rank: is 4; compiled layers have no input .*: set engine.program to step"),
    ],
)
def test_unsupported_features_of_compiled_layers(registry: Registry, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _plan(registry, "llama/sft", "--engine.program=layers", *words)


def test_on_a_mesh(registry: Registry) -> None:
    parallel = '--parallel={"tensor_parallel_degree":2,"sequence_parallel":true,"sharding":"stage2"}'
    assert _plan(registry, "llama/sft", "--launch.num_devices=4", parallel).parallel.degrees.num_data_ranks == 2


@pytest.mark.parametrize("recipe", ["llama/lora", "llama/dpo", "llama/orpo", "llama/rm", "llama/kto"])
@pytest.mark.parametrize("parallel", [PP2, '--parallel={"sharding":"stage3"}'])
def test_on_two_ranks(registry: Registry, recipe: str, parallel: str) -> None:
    words = "--launch.num_devices=2", parallel, "--train.micro_batch_size=2"
    assert _plan(registry, recipe, *words).parallel.degrees.num_ranks == 2


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "interleaved"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("recipe", ["llama/sft", "llama/lora", "llama/dpo", "llama/rm", "llama/kto"])
def test_on_a_pipeline(registry: Registry, recipe: str, stages: int, schedule: str) -> None:
    parallel = {"pipeline_parallel_degree": stages, "pipeline_schedule": schedule, "sharding": "stage3"}
    words = f"--launch.num_devices={2 * stages}", f"--parallel={json.dumps(parallel)}", "--engine.recompute=full"
    sizes = "--train.global_batch_size=32", "--train.micro_batch_size=2", "--model.config.num_hidden_layers=8"
    plan = _plan(registry, recipe, *words, *sizes)
    assert (plan.parallel.degrees.pp, plan.parallel.num_chunks) == (stages, 2 if schedule == "interleaved" else 1)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("llama/sft", ["--engine.mode=dynamic"], "engine.program: is step, but mode is dynamic"),
        (
            "llama/grpo",
            ["--grpo.entropy_coef=0.1"],
            "grpo.entropy_coef: is set, but a compiled step computes no entropies; set it to 0, or engine.program",
        ),
        (
            "llama/dpo",
            ["--launch.num_devices=2", PP2, "--train.micro_batch_size=1"],
            "train.micro_batch_size: is 1, but pipelines of .* need 2 rows or more; set it to 2",
        ),
        (
            "qwen_moe/sft",
            ["--launch.num_devices=4", '--parallel={"expert_parallel_degree":2}'],
            "parallel.expert_parallel_degree: is 2, but .* distributes experts over all 4 data ranks; set it",
        ),
        (
            "llama/sft",
            [
                "--launch.num_devices=2",
                '--parallel={"pipeline_parallel_degree":2,"pipeline_schedule":"interleaved"}',
                *("--train.micro_batch_size=2", "--train.global_batch_size=6", "--model.config.num_hidden_layers=4"),
            ],
            "train.global_batch_size: is 6, which is 3 micro-batches on each data rank; interleaved pipelines of .* "
            "need a multiple of 2: change it or train.micro_batch_size, or set parallel.pipeline_schedule to 1F1B",
        ),
        (
            "llama/sft",
            ["--launch.num_devices=2", PP2, "--train.micro_batch_size=1"],
            "train.micro_batch_size: is 1, but pipelines of .* need 2 rows or more; set it to 2, or engine.program",
        ),
        (
            "llama/sft",
            ["--launch.num_devices=2", PP2, "--train.micro_batch_size=4", "--train.global_batch_size=4"],
            "train.global_batch_size: is 4, which is 1 micro-batch on each data rank; .* or lower train.micro",
        ),
        (
            "llama/sft",
            ["--launch.num_devices=4", '--parallel={"sharding":"stage1","sharding_parallel_degree":2}'],
            "parallel.sharding_parallel_degree: is 2, but engine.program step shards over all data ranks",
        ),
        (
            "llama/sft",
            ["--train.master_weights=false"],
            "train.master_weights: is false, which engine.program step does not support; set it to true, or",
        ),
        (
            "llama/sft",
            ["--train.optimizer=adamw_8bit"],
            "train.optimizer: is adamw_8bit, which engine.program step does not support; set it to adamw, or",
        ),
        (
            "llama/sft",
            ["--lora.rank=4", "--lora.share_first=true"],
            "lora.share_first: is true, which engine.program step does not support; set it to false, or",
        ),
        (
            "llama/sft",
            ["--engine.offload_optimizer=true"],
            "engine.offload_optimizer: is true, but a compiled step updates all parameters .* set it to false, or",
        ),
        ("llama/lora", ["--lora.method=mora"], "lora.method: is mora, which is recomputed in the backward pass"),
        ("llama/lora", ["--lora.init=lora_ga"], "lora.init: is lora_ga, which needs gradients of frozen matrices"),
        (
            "llama/lora",
            ["--lora.dropout=0.1"],
            "lora.dropout: is 0.1, but with to_static equal layers share one program",
        ),
        ("llama/lora", ["--lora.base_dtype=nf4"], "lora.base_dtype: is nf4, which to_static does not support"),
        (
            "llama/sft",
            ["--qat.weight_bits=8", "--qat.activation_bits=8"],
            "qat.activation_bits: is 8, but programs compiled by to_static cannot record",
        ),
        (
            "llama/sft",
            [
                *("--launch.num_devices=2", PP2, "--train.micro_batch_size=2"),
                *("--prefix.tokens=4", "--prefix.projection=true"),
            ],
            "prefix.projection: is true, but pipelines of .* cannot share its network .* set it to false",
        ),
        (
            "llama/sft",
            ["--train.micro_batch_tokens=256"],
            "train.micro_batch_tokens: is 256, but micro-batches with varying numbers of rows",
        ),
        (
            "llama/sft",
            ["--launch.num_devices=2", '--parallel={"gradient_bucket_bytes":0}'],
            "parallel.gradient_bucket_bytes: is 0, but a compiled step reduces each gradient .* set it to null, or",
        ),
        ("llama/sft", ["--engine.loss_chunk_tokens=64"], "engine.loss_chunk_tokens: is 64, .* set it to null, or"),
        ("deepseek/pretrain", ["--train.mtp_loss_weight=0.3"], "train.mtp_loss_weight: is 0.3, .* set it to 0, or"),
    ],
)
def test_unsupported_features_of_compiled_steps(
    registry: Registry, recipe: str, words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _plan(registry, recipe, *words)


MODES = {
    "dynamic": ("--engine.mode=dynamic", "--engine.program=layers"),
    "layers": ("--engine.program=layers",),
    "step": (),
}
NO_FP16 = "engine.precision: is fp16, which cpu does not support; use fp32, bf16"
REFUSED = {("cpu", mode, "fp16"): NO_FP16 for mode in MODES}
"""Rejected combinations of device, mode and precision. The others run: on the CPU in tests/multi/test_programs.py and
test_bf16_programs.py, as on a GPU in test_standin.py, test_standin_further.py and test_standin_programs.py."""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", "gpu", "xpu"])
def test_precisions_of_modes(registry: Registry, device: str, mode: str, precision: str) -> None:
    words = (*MODES[mode], f"--device={device}", f"--engine.precision={precision}")
    refused = REFUSED.get((device, mode, precision))
    if refused is None:
        assert _plan(registry, "llama/sft", *words).recipe.engine.precision == precision
        return
    with pytest.raises(UserError) as caught:
        _plan(registry, "llama/sft", *words)
    assert refused in str(caught.value)


@pytest.mark.parametrize(
    ("device", "precision", "parallel"),
    [
        *((device, precision, '{"sharding":"stage3"}') for device, precision in SIXTEEN_BITS),
        ("cpu", "bf16", '{"pipeline_parallel_degree":2}'),  # which gpu refuses
    ],
)
def test_16_bits_are_everywhere(registry: Registry, device: str, precision: str, parallel: str) -> None:
    words = "--launch.num_devices=2", f"--parallel={parallel}", "--train.micro_batch_size=2", f"--device={device}"
    assert _plan(registry, "llama/sft", *words, f"--engine.precision={precision}").recipe.engine.compiles_steps


def test_bf16_on_the_cpu_is_not_for_layers_with_tensor_parallel(registry: Registry) -> None:
    bf16 = "--engine.precision=bf16"
    ranks = "--launch.num_devices=2"
    assert _plan(registry, "llama/sft", bf16, "--engine.recompute=full").recipe.engine.compiles_steps
    tp2 = (ranks, '--parallel={"tensor_parallel_degree":2}', bf16)
    assert _plan(registry, "llama/sft", *tp2).parallel.degrees.tp == 2
    with pytest.raises(UserError, match=r"engine.precision: is bf16, whose matrix products on cpu run on the shard"):
        _plan(registry, "llama/sft", *tp2, "--engine.program=layers")
    assert _plan(registry, "llama/sft", ranks, PP2, bf16, "--engine.program=layers").parallel.degrees.pp == 2


@pytest.mark.parametrize("answer", ["stop", "skip", "roll_back"])
def test_a_bad_step_is_answered_as_asked(registry: Registry, answer: str) -> None:
    words = "--train.spike_factor=3", f"--train.on_spike={answer}", f"--train.on_nonfinite={answer}"
    assert _plan(registry, "llama/sft", *words, "--checkpoint.save_steps=1").recipe.train.on_spike == answer
