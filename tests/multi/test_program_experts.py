"""Whole steps of models with routed experts as programs equal the same steps op by op."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import SAVES, SP, TP2, WORDS, on_mesh, op_by_op, resume_from_first
from tests.multi.test_programs import compare_job
from tests.parity.cases import OPTIMIZERS, Case, few, once, run_cases
from tests.parity.lora import LORA

ADAMW, SGD = OPTIMIZERS["adamw"], (*OPTIMIZERS["sgd"], "--train.weight_decay=0")
BALANCE, BIAS = "--train.expert_balance_loss=0.3", "--train.expert_bias_rate=0.01"
EXPERTS = '--lora.target_modules=["experts.*", "o_proj"]'
EP2 = {"expert_parallel_degree": 2}
TWO, AGAIN = "--train.micro_batch_size=2", "--engine.recompute=full"
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepseek adamw": ("deepseek/sft", (*ADAMW, BALANCE, BIAS)),
    "deepseek sgd": ("deepseek/pretrain", (*SGD, "--pretrain.split=null", BALANCE, BIAS)),
    "qwen_moe": ("qwen_moe/sft", (*SGD, BALANCE)),
    "packed": ("ernie_moe/sft", (*ADAMW, "--data.packing=best_fit", BALANCE, BIAS)),
    "lora": ("deepseek/lora", (*SGD, *LORA, EXPERTS, "--train.learning_rate=0.5")),
    "dora": ("deepseek/lora", (*ADAMW, "--lora.rank=4", "--lora.method=dora", EXPERTS, "--train.learning_rate=3e-2")),
    "dpo": ("qwen_moe/dpo", (*SGD, BALANCE)),
    "packed pairs": ("qwen_moe/dpo", (*SGD, BALANCE, "--data.packing=best_fit")),
    "rm": ("deepseek/rm", (*SGD, "--train.learning_rate=0.2", BALANCE)),
    "kto": ("deepseek/kto", (*SGD, BALANCE, BIAS)),
}
ON_RANKS: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    # the job, ranks, mesh, words
    "deepseek adamw, again": ("deepseek adamw", 1, {}, (TWO, AGAIN)),
    **{f"{job}, one": (job, 1, {}, (TWO,)) for job in JOBS},
    "dp2": ("deepseek sgd", 2, {}, (TWO,)),
    "stage1": ("deepseek adamw", 2, {"sharding": "stage1"}, (TWO,)),
    "stage3": ("packed", 2, {"sharding": "stage3"}, (TWO,)),
    "tp2 sgd": ("deepseek sgd", 2, TP2, ()),
    "tp2 adamw, again": ("deepseek adamw", 2, {**TP2, **SP}, (AGAIN,)),
    "tp2 qwen_moe": ("qwen_moe", 2, {**TP2, **SP}, ()),
    "tp2 packed": ("packed", 2, TP2, ()),
    "tp2 lora": ("lora", 2, {**TP2, **SP}, ()),
    "tp2 dpo": ("dpo", 2, TP2, (TWO,)),
    "tp2 packed pairs": ("packed pairs", 2, {**TP2, **SP}, (TWO,)),
    "tp2 selective": ("qwen_moe", 2, {**TP2, **SP}, ("--engine.recompute=selective",)),
    "ep2 sgd": ("deepseek sgd", 2, EP2, (TWO,)),
    "ep2 stage1, again": ("deepseek adamw", 2, {**EP2, "sharding": "stage1"}, (TWO, AGAIN)),
    "ep2 stage3": ("packed", 2, {**EP2, "sharding": "stage3"}, (TWO,)),
    "ep2 lora": ("lora", 2, EP2, (TWO,)),
    "tp2 ep2": ("qwen_moe", 4, {**TP2, **SP, **EP2}, (TWO,)),
    "tp2 dp2": ("deepseek adamw", 4, {**TP2, "sharding": "stage2"}, (TWO,)),
}
KEPT = ("deepseek adamw, again", "qwen_moe, one", "kto, one", "stage3", "tp2 sgd", "tp2 lora")
MESHES = few(ON_RANKS, *(mesh for mesh in ON_RANKS if mesh not in KEPT))
"""Of these `make test` runs the ones above."""


def _one(job: str) -> Case:
    """The run of a job op by op, in one process."""
    recipe, words = JOBS[job]
    return Case(job, 1, once([*WORDS, *words, *SAVES]), recipe=f"recipes/{recipe}.json")


def _many(mesh: str) -> Case:
    job, ranks, parallel, more = MESHES[mesh]
    return on_mesh(_one(job), mesh, ranks, parallel, *more)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    ones = {job: _one(job) for job, *_ in MESHES.values()}
    return run_cases(runner, [*ones.values(), *map(_many, MESHES)])


def check_equal(runner: Runner, failed: dict[str, str], job: str, mesh: str) -> None:
    """A run on a mesh beside the one of its job in one process."""
    assert not failed.keys() & {job, mesh}, failed
    assert compare_job(runner, job, job, mesh).problems == []
    assert "experts/max_load" in runner.metrics(mesh)[-1]


def check_resumes(runner: Runner, failed: dict[str, str], job: str, programs: Case) -> None:
    """Programs from the first checkpoint of a job op by op in one process, and op by op on the same ranks from that of
    the programs: with the biases of the gates."""
    assert not failed.keys() & {job, programs.name}, failed
    again = {"programs go on": (job, programs), "goes on from programs": (programs.name, op_by_op(programs))}
    resume_from_first(runner, again)
    for name in again:
        for ours, theirs in zip(runner.metrics(name), runner.metrics(job)[1:], strict=True):
            for key in ("loss", "grad_norm", "experts/balance_loss"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-6), (name, key)
            assert ours["experts/max_load"] == pytest.approx(theirs["experts/max_load"], rel=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    check_equal(runner, failed, MESHES[mesh][0], mesh)


def test_goes_on_in_either_mode(runner: Runner, failed: dict[str, str]) -> None:
    check_resumes(runner, failed, "deepseek adamw", _many("deepseek adamw, again"))
