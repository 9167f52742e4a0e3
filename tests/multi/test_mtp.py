"""Multi-token prediction trains as in one process on every mesh, with adapters too; what is sent and kept is as
planned; checkpoints are of no mesh, and are written as the published weights are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, GRADIENT_LIMIT, LIMIT, OPTIMIZERS, STEPS, Case, compare, few, plan_of, run_cases
from tests.parity.lora import compare_updates
from tests.parity.planned import check_truth

TP, SP = {"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 2, "sequence_parallel": True}
PP = {"pipeline_parallel_degree": 2}
KEPT, AGAIN = "--engine.recompute=none", "--engine.recompute=full"
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
ONES = [f"one {kind}" for kind in dict.fromkeys(kind for kind, *_ in MESHES.values())]
CONTINUED = {"ep2 stage1, again": "interleaved"}
"""A checkpoint of the one, and what goes on from it."""


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


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ended = run_cases(runner, [case_of(name, name) for name in (*ONES, *MESHES)])
    cases = []
    for source, target in CONTINUED.items():
        if source not in ended:
            name, step = f"{source} then {target}", "checkpoints/step-1"
            shutil.copytree(runner.directory / source / step, runner.directory / name / step)
            cases.append(case_of(name, target, resume=True))
    return ended | run_cases(runner, cases)


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_to_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    kind = MESHES[mesh][0]
    one = f"one {kind}"
    for name in (one, mesh):
        assert name not in failed, failed[name]
    check_equal(runner, one, mesh, kind)


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


@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_is_as_planned(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    assert mesh not in failed, failed[mesh]
    found = check_truth(runner.directory / mesh, plan_of(case_of(mesh, mesh)))
    assert abs(found.memory["between_steps"]) <= 0.01
    assert abs(found.memory["gradients"]) <= 0.01


@pytest.mark.parametrize("source", CONTINUED)
def test_a_checkpoint_is_continued_on_another_mesh(runner: Runner, failed: dict[str, str], source: str) -> None:
    name = f"{source} then {CONTINUED[source]}"
    assert name not in failed, failed[name]
    whole, found = runner.metrics("one sft")[1:], runner.metrics(name)
    assert [record["step"] for record in found] == [record["step"] for record in whole] == [2, 3]
    for a, b in zip(whole, found):
        for key in ("loss", "grad_norm", "mtp_loss"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
