"""What `llmsuite plan` says a rank sends in a step is what passes through the communication library, and what it says
lives in memory is what Paddle's allocator counts: of two ranks, and alone. The lattice and `make matrix` have more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import RECIPES, Case, plan_of, run_cases
from tests.parity.planned import check_truth

TP = {"tensor_parallel_degree": 2}
SP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
PP = {"pipeline_parallel_degree": 2}
KEPT = ("--engine.recompute=none",)
STATIC = ("--engine.mode=to_static",)
TIED = ("--model.config.tie_word_embeddings=true",)
AGAIN = ("--engine.recompute=full",)
BIASES = ("--model.config.attention_bias=true", "--model.config.mlp_bias=true")
TWO = ("--train.micro_batch_size=2",)
ROUTED = '--lora.target_modules=["experts.*", "self_attn.*"]'
ENDS = '--lora.target_modules=["embed_tokens", "*_proj", "lm_head"]'
BF16 = "--engine.precision=bf16"
REFT = "--reft.rank=4"
FULL_ENDS = ('--lora.modules_to_save=["embed_tokens", "lm_head"]', "--lora.ensure_weight_tying=true")
PREFIX = "--prefix.tokens=40"
NETWORK = (PREFIX, "--prefix.projection=true", "--prefix.projection_hidden_size=200")
RUNS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "stage 2": ("llama/sft", {"sharding": "stage2"}, ()),
    "stage 3": ("llama/sft", {"sharding": "stage3"}, ()),
    "stage 3, tied, kept": ("llama/sft", {"sharding": "stage3"}, (*KEPT, *TIED)),
    "tensor": ("tokens", TP, TWO),
    "compiled sequence": ("llama/sft", SP, (*STATIC, *TWO)),
    "compiled sequence, kept": ("llama/sft", SP, (*STATIC, *TWO, *KEPT)),
    "reward model": ("llama/rm", SP, ()),
    "qwen": ("qwen/sft", TP, ()),
    "gpt, sequence": ("gpt/sft", SP, ()),
    "gpt, sequence, kept": ("gpt/sft", SP, KEPT),
    "gpt, compiled sequence": ("gpt/sft", SP, (*STATIC, *AGAIN, *TWO)),
    "gpt, adapters, sequence": ("gpt/lora", SP, KEPT),
    "biases": ("llama/sft", TP, BIASES),
    "biases, sequence": ("llama/sft", SP, (*KEPT, *BIASES)),
    "biases, sequence, again": ("llama/sft", SP, (*AGAIN, *BIASES)),
    "biases, compiled sequence": ("llama/sft", SP, (*STATIC, *AGAIN, *BIASES, *TWO)),
    "biases, adapters, sequence": ("llama/lora", SP, BIASES),
    "deepseek": ("deepseek/sft", TP, AGAIN),
    "deepseek, sequence": ("deepseek/sft", SP, ()),
    "deepseek, compiled": ("deepseek/sft", SP, (*STATIC, *AGAIN)),
    "deepseek, experts": ("deepseek/sft", {"expert_parallel_degree": 2, "sharding": "stage2"}, AGAIN),
    "deepseek, pipeline": ("deepseek/sft", PP, ()),
    "adapters": ("llama/lora", TP, ()),
    "adapters, kept": ("llama/lora", TP, KEPT),
    "adapters, sequence": ("llama/lora", SP, ()),
    "adapters, sequence, kept": ("llama/lora", SP, KEPT),
    "mixer, sequence, kept": ("llama/lora", SP, (*KEPT, "--lora.method=mixer")),
    "dora, kept": ("llama/lora", TP, (*KEPT, "--lora.method=dora")),
    "pissa, sequence, kept": ("llama/lora", SP, (*KEPT, "--lora.init=pissa")),
    "mora, kept": ("llama/lora", TP, (*KEPT, "--lora.method=mora")),
    "mora, sequence": ("llama/lora", SP, ("--lora.method=mora",)),
    "vera, kept": ("llama/lora", TP, (*KEPT, "--lora.method=vera")),
    "vera, sequence": ("llama/lora", SP, ("--lora.method=vera",)),
    "lokr, sequence, kept": ("llama/lora", SP, (*KEPT, "--lora.method=lokr")),
    "dropout, kept": ("llama/lora", TP, (*KEPT, "--lora.dropout=0.1")),
    "dropout, pipeline": ("llama/lora", PP, ("--lora.dropout=0.1",)),
    "dora, sequence": ("llama/lora", SP, ("--lora.method=dora",)),
    "adapters, experts": (
        "deepseek/lora",
        {"expert_parallel_degree": 2, "sharding": "stage2"},
        (*KEPT, ROUTED),
    ),
    "adapters, experts, tensor": ("deepseek/lora", TP, (*KEPT, ROUTED)),
    "dora, experts, tensor": ("deepseek/lora", TP, (*KEPT, ROUTED, "--lora.method=dora")),
    "dropout, experts": (
        "deepseek/lora",
        {"expert_parallel_degree": 2, "sharding": "stage2"},
        (*KEPT, ROUTED, "--lora.dropout=0.1"),
    ),
    "adapters, ends, sequence": ("llama/lora", SP, (*KEPT, ENDS)),
    "dora, ends, sequence": ("llama/lora", SP, (*KEPT, ENDS, "--lora.method=dora")),
    "pissa, ends": ("llama/lora", TP, (*KEPT, ENDS, "--lora.init=pissa")),
    "pissa, ends, sequence": ("llama/lora", SP, (*KEPT, ENDS, "--lora.init=pissa")),
    "adapters, full ends": ("llama/lora", TP, FULL_ENDS),
    "adapters, full ends, sequence, kept": ("llama/lora", SP, (*KEPT, *FULL_ENDS)),
    "adapters, full ends, pipeline": ("llama/lora", PP, FULL_ENDS),
    "adapters, full ends, stage 3": ("llama/lora", {"sharding": "stage3"}, FULL_ENDS),
    "adapters, full table, gpt, sequence": ("gpt/lora", SP, (*KEPT, *FULL_ENDS)),
    "adapters, stage 3": ("llama/lora", {"sharding": "stage3"}, ()),
    "sequence, bf16": ("llama/sft", SP, (*KEPT, BF16)),
    "deepseek, bf16": ("deepseek/sft", TP, (*AGAIN, BF16)),
    "adapters, bf16, stage 3": ("llama/lora", {"sharding": "stage3"}, (BF16,)),
    "adapters, bf16, sequence, kept": ("llama/lora", SP, (*KEPT, BF16)),
    "interventions": ("llama/sft", TP, (*KEPT, REFT)),
    "interventions, sequence": ("llama/sft", SP, (REFT,)),
    "interventions, sequence, kept": ("llama/sft", SP, (*KEPT, REFT, "--reft.layers=[2]")),
    "interventions, pipeline": ("llama/sft", PP, (REFT,)),
    "interventions, stage 3": ("llama/sft", {"sharding": "stage3"}, (REFT,)),
    "prefix, kept": ("llama/sft", TP, (*KEPT, PREFIX)),
    "prefix, packed": ("llama/sft", TP, (*KEPT, PREFIX, "--data.packing=best_fit")),
    "prefix, gpt, sequence": ("gpt/sft", SP, (*KEPT, PREFIX)),
    "prefix, sequence, selective": ("qwen/sft", SP, (PREFIX, "--engine.recompute=selective")),
    "prefix, pipeline": ("llama/sft", PP, (PREFIX,)),
    "prefix, stage 3": ("llama/sft", {"sharding": "stage3"}, (PREFIX,)),
    "prefix, compiled sequence": ("llama/sft", SP, (*STATIC, *TWO, PREFIX)),
    "prefix network, kept": ("llama/sft", TP, (*KEPT, *NETWORK)),
    "prefix network, pipeline": ("llama/sft", PP, NETWORK),
    "prefix network, stage 3": ("llama/sft", {"sharding": "stage3"}, NETWORK),
}
ALONE = {
    "one, again": ("llama/sft", AGAIN),
    "one, kept": ("llama/dpo", KEPT),
    "one, selective": ("qwen/sft", ("--engine.recompute=selective",)),
    "one, gpt": ("gpt/sft", KEPT),
    "one, deepseek": ("deepseek/sft", KEPT),
    "one, interventions": ("llama/sft", (*KEPT, REFT)),
    "one, prefix": ("llama/sft", (*KEPT, PREFIX)),
    "one, prefix, qwen": ("qwen/sft", (*KEPT, PREFIX)),
    "one, prefix network": ("llama/sft", (*KEPT, *NETWORK)),
    "one, gpt, adapters": ("gpt/lora", KEPT),
    "one, bf16": ("llama/sft", (*KEPT, BF16)),
    "one, gpt, bf16": ("gpt/sft", (*KEPT, BF16)),
    "one, prefix, bf16": ("llama/sft", (*KEPT, PREFIX, BF16)),
    "one, adapters, bf16": ("llama/lora", (*KEPT, BF16)),
    "one, full ends": ("llama/lora", (*KEPT, *FULL_ENDS)),
    "one, full ends, bf16": ("llama/lora", (*KEPT, *FULL_ENDS, BF16)),
    "one, ends": ("llama/lora", (*KEPT, ENDS)),
    "one, mixer, ends": ("llama/lora", (*KEPT, ENDS, "--lora.method=mixer")),
    "one, experts": ("deepseek/lora", (*KEPT, ROUTED)),
    "one, dora, experts": ("deepseek/lora", (*KEPT, ROUTED, "--lora.method=dora")),
    "one, mora, experts": ("deepseek/lora", (*KEPT, ROUTED, "--lora.method=mora")),
    "one, pissa, experts": ("deepseek/lora", (*KEPT, ROUTED, "--lora.init=pissa")),
}
COMMON = (
    "--train.max_steps=2", "--train.global_batch_size=4", "--data.eval=null", "--checkpoint.save_steps=null",
    "--data.group_by_length=false",
)  # fmt: skip


def _case(name: str) -> Case:
    if name in ALONE:
        recipe, more = ALONE[name]
        parallel = {}
        num_ranks = 1
    else:
        (recipe, parallel, more), num_ranks = RUNS[name], 2
    more = more if TWO[0] in more else (*more, "--train.micro_batch_size=1")
    words = [*COMMON, f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}", *more]
    return Case(name, num_ranks, words, recipe=RECIPES.get(recipe, f"recipes/{recipe}.json"), trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    assert run_cases(runner, map(_case, [*ALONE, *RUNS])) == {}
    return runner


@pytest.mark.parametrize("name", [*ALONE, *RUNS])
def test_a_run_is_as_planned(runs: Runner, name: str) -> None:
    """Every message of each rank, the order of passes, live memory."""
    found = check_truth(runs.directory / name, plan_of(_case(name)))
    assert abs(found.memory["between_steps"]) <= 0.01
    assert abs(found.memory["gradients"]) <= 0.01
