"""More of what GPUs do in 16 bits, on CPU processes that stand in for them (`tests.standin`): adapters on pipelines and
tensor parallel ranks, packed rows, and layers that are programs.

What is compared how: see `tests.multi.test_standin`. A program adds up the gradients of an input that several products
have in another order than Paddle's tape, each sum rounded; so its runs are as close as roundings can be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, Case, few, four_layers, once, run_cases
from tests.parity.condition import nudged
from tests.parity.lora import LORA
from tests.support.lora_meshes import INTERLEAVED, PP, RECOMPUTE, SP, STATIC, TP
from tests.support.standin_runs import of, problems

PACKED = ("--data.packing=best_fit",)
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft": ("llama/sft", ()),
    "packed": ("llama/sft", PACKED),
    "lora": ("llama/lora", LORA),
    "lokr": ("llama/lora", (*LORA, "--lora.method=lokr", "--lora.lora_plus_ratio=1")),
    "mora": ("llama/lora", (*LORA, "--lora.method=mora", "--lora.lora_plus_ratio=1")),
    "mixer": ("llama/lora", (*LORA, "--lora.method=mixer")),
    "dora": ("llama/lora", (*LORA, "--lora.method=dora")),
    "vera": ("llama/lora", (*LORA, "--lora.method=vera", "--lora.lora_plus_ratio=1", "--train.learning_rate=0.05")),
    "experts": ("qwen_moe/sft", ()),
    # of all experts: which ones a token goes to, a rounded number would tip
    "latent": ("deepseek/sft", ("--model.config.num_experts_per_tok=8", "--model.config.topk_group=4")),
}
ON_RANKS: dict[str, tuple[str, int, Mapping[str, Any], tuple[str, ...]]] = {
    "lora, pp2": ("lora", 2, PP, ()),
    "lora, pp2 interleaved, recompute": ("lora", 2, INTERLEAVED, (RECOMPUTE,)),
    "lokr, pp2": ("lokr", 2, PP, ()),
    "lokr, tp2": ("lokr", 2, {**TP, **SP}, ()),
    "mora, pp2": ("mora", 2, PP, ()),
    "mora, tp2": ("mora", 2, {**TP, **SP}, ()),
    "mixer, tp2": ("mixer", 2, {**TP, **SP}, ()),
    "dora, tp2": ("dora", 2, {**TP, **SP}, ()),
    "vera, tp2": ("vera", 2, {**TP, **SP}, ()),
    "packed, dp2": ("packed", 2, {}, ()),
    "packed, pp2": ("packed", 2, PP, ()),
    "packed, tp2": ("packed", 2, {**TP, **SP}, ()),
    "packed, stage3": ("packed", 2, {"sharding": "stage3"}, (RECOMPUTE,)),
    "sft, programs": ("sft", 1, {}, (STATIC,)),
    "packed, programs": ("packed", 1, {}, (STATIC,)),
    "lora, programs": ("lora", 1, {}, (STATIC, RECOMPUTE)),
    "sft, programs, pp2": ("sft", 2, PP, (STATIC,)),
    "sft, programs, tp2": ("sft", 2, {**TP, **SP}, (STATIC,)),
    "sft, programs, stage3": ("sft", 2, {"sharding": "stage3"}, (STATIC,)),
    "experts, programs": ("experts", 1, {}, (STATIC,)),
    "experts, programs, ep2": ("experts", 2, {"expert_parallel_degree": 2}, (STATIC,)),
    "latent, programs, pp2": ("latent", 2, PP, (STATIC,)),
}
MESHES = few(
    ON_RANKS,
    "lora, pp2 interleaved, recompute", "lokr, tp2", "mora, pp2", "packed, pp2",
    "packed, tp2", "packed, stage3", "packed, programs",
    "lora, programs", "sft, programs, pp2", "experts, programs",
)  # fmt: skip


def _case(
    name: str, job: str, num_ranks: int = 1, parallel: Mapping[str, Any] | None = None, words: Sequence[str] = ()
) -> Case:
    recipe, run = JOBS[job]
    given = [
        *COMMON, *OPTIMIZERS["sgd"], *four_layers(recipe.partition("/")[0]), "--engine.recompute=none",
        "--checkpoint.save_steps=null",
        "--train.micro_batch_size=1", f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel or {})}",
        *run, *words,
    ]  # fmt: skip
    return Case(name, num_ranks, once(given), recipe=f"recipes/{recipe}.json")


WIDE = {job: _case(f"{job}, float32", job) for job, *_ in MESHES.values()}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    moved = [run for wide in WIDE.values() for run in nudged(wide)]
    ones = [of(_case(job, job), job) for job in WIDE]
    many = [of(_case(mesh, *how), mesh) for mesh, how in MESHES.items()]
    return run_cases(runner, [*WIDE.values(), *moved, *ones, *many])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    job, _, parallel, words = MESHES[mesh]
    wide = WIDE[job]
    needed = {wide.name, *(run.name for run in nudged(wide)), job, mesh}
    assert not needed & failed.keys(), [failed[name] for name in needed & failed.keys()]
    is_rounded = "tensor_parallel_degree" in parallel or STATIC in words
    assert problems(runner, job, mesh, is_rounded, wide) == []
