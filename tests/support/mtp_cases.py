"""Runs with multi-token prediction, and how they are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, GRADIENT_LIMIT, LIMIT, OPTIMIZERS, STEPS, Case, compare, few
from tests.parity.lora import compare_updates

TP = {"tensor_parallel_degree": 2}
SP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
PP = {"pipeline_parallel_degree": 2}
KEPT = "--engine.recompute=none"
AGAIN = "--engine.recompute=full"
# name: what is trained, ranks, what is parallel, further words; more of adapters and qat: tests/parity/test_mtp.py
MESHES: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    "tp2, again": ("sft", 2, TP, (AGAIN,)),
    "tp2 in sequences": ("sft", 2, SP, (KEPT,)),
    "ep2 stage1, again": ("sft", 2, {"expert_parallel_degree": 2, "sharding": "stage1"}, (AGAIN,)),
    "stage3": ("sft", 2, {"sharding": "stage3"}, (KEPT,)),
    "interleaved": ("sft", 2, {**PP, "pipeline_schedule": "interleaved"}, (KEPT, "--engine.loss_chunk_tokens=64")),
    "tp2 pp2": ("pretrain", 4, {**SP, **PP}, ("--engine.recompute=selective",)),
    "pp2 ep2 stage3": ("pretrain", 4, {**PP, "expert_parallel_degree": 2, "sharding": "stage3"}, (AGAIN,)),
    "tp2 of adapters, again": ("lora", 2, SP, (AGAIN,)),
}
MESHES = few(MESHES, "tp2, again", "tp2 pp2", "pp2 ep2 stage3")
PACKED = "--data.packing=best_fit"
ADAPTERS = (PACKED, "--train.expert_bias_rate=0", "--train.learning_rate=0.03", "--lora.rank=4")
# what is trained: the recipe of its stage, and words
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft": ("sft", (PACKED,)),
    "pretrain": (
        "pretrain",
        ("--pretrain.document_mask=true", "--pretrain.split=null", "--train.min_lr_ratio=0"),
    ),
    "lora": ("lora", (*ADAPTERS, "--lora.dropout=0.1")),
    "expert lora": ("lora", (*ADAPTERS, '--lora.target_modules=["*_proj*", "lm_head"]')),
    "lora_ga": ("lora", (*ADAPTERS, "--train.learning_rate=0.2", "--lora.init=lora_ga", "--lora.rslora=true")),
    "qat": ("sft", (PACKED, "--qat.weight_bits=8", "--qat.activation_bits=8")),
}


def case_of(name: str, mesh: str, resume: bool = False, meshes: Mapping[str, Any] = MESHES) -> Case:
    """The run of a mesh, or of "one KIND" in one process."""
    alone = mesh.removeprefix("one ")
    kind, num_ranks, parallel, more = meshes.get(mesh, (alone, 1, {}, ("--train.micro_batch_size=8", KEPT)))
    stage, words_of_kind = KINDS[kind]
    optimizer = "sgd" if kind == "lora_ga" else "adamw"  # moments magnify what singular vectors are off by
    words = [
        *COMMON, *OPTIMIZERS[optimizer], "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}",
        f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}", "--train.micro_batch_size=2",
        "--train.mtp_loss_weight=0.3", "--train.expert_balance_loss=0.3", "--train.expert_bias_rate=0.01",
        "--model.config.num_nextn_predict_layers=1", "--data.max_length=192", *words_of_kind, *more,
    ]  # fmt: skip
    last = {word.partition("=")[0]: word for word in words}
    recipe = f"recipes/deepseek/{stage}.json"
    return Case(name, num_ranks, list(last.values()), recipe=recipe, resume=resume, trace=num_ranks > 1)


def check_equal(runner: Runner, one: str, mesh: str, kind: str) -> None:
    """A run on a mesh equals that of the same kind in one process, its metrics of further tokens and experts too."""
    # a second factor begins at zero: it is nothing but a sum of gradients, and has no more digits than those
    stem, limit = ("adapter_model", GRADIENT_LIMIT) if "lora" in kind else ("model", LIMIT)
    is_ga = kind == "lora_ga"
    found = compare_updates(runner, one, mesh) if is_ga else compare(runner, one, mesh, stem, limit)
    print(f"{mesh}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []
    for a, b in zip(runner.metrics(one), runner.metrics(mesh), strict=True):
        for key in ("mtp_loss", "experts/max_load", "experts/balance_loss"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
