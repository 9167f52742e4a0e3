"""Jobs of models with routed experts whose whole steps are programs, and how they are compared."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import op_by_op, resume_from_first
from tests.parity.cases import OPTIMIZERS, Case
from tests.parity.lora import LORA
from tests.support.program_jobs import compare_job

ADAMW = OPTIMIZERS["adamw"]
SGD = (*OPTIMIZERS["sgd"], "--train.weight_decay=0")
BALANCE = "--train.expert_balance_loss=0.3"
BIAS = "--train.expert_bias_rate=0.01"
EXPERTS = '--lora.target_modules=["experts.*", "o_proj"]'
EP2 = {"expert_parallel_degree": 2}
TWO = "--train.micro_batch_size=2"
AGAIN = "--engine.recompute=full"
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
