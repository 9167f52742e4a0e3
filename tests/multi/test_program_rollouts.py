"""Stages with rollouts in programs of whole steps: completions, losses and metrics equal the dynamic mode."""

from __future__ import annotations

import json
import math

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import PP2, PROGRAM, TP2
from tests.parity.cases import LIMIT, Case, few, once
from tests.support.program_jobs import run_apart

STEPS = 4
WORDS = (
    f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--train.lr_schedule=constant",
    "--train.warmup_ratio=0", "--train.optimizer=sgd", "--train.learning_rate=0.1", "--data.max_length=64",
    "--model.config.num_hidden_layers=2", "--engine.recompute=none", "--data.eval=null", "--checkpoint.save_steps=null",
    "--rollout.temperature=0.8",
)  # fmt: skip
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("grpo", ()),
    # a ratio for each sequence, of a second update too, and a divergence from the reference
    "sequences": (
        "grpo",
        ("--grpo.updates=2", "--grpo.importance_sampling_level=sequence", "--grpo.reference=copy", "--grpo.beta=0.1"),
    ),
    "online_dpo": ("online_dpo", ("--online_dpo.sft_weight=0.1", "--train.learning_rate=0.05")),
    # its critic is trained op by op, beside the program
    "ppo": ("ppo", ("--ppo.updates=2", "--ppo.kl_target=0.01", "--ppo.critic.learning_rate=0.05")),
}
ON_RANKS: dict[str, tuple[str, int, dict[str, object]]] = {
    **{job: (job, 1, {}) for job in JOBS},
    "dp2 sequences": ("sequences", 2, {}),
    "tp2 grpo": ("grpo", 2, {**TP2, "sequence_parallel": True}),
    "dp2 online_dpo": ("online_dpo", 2, {}),
    "tp2 ppo": ("ppo", 2, TP2),
    "stage3 grpo": ("grpo", 2, {"sharding": "stage3"}),
    "pp2 sequences": ("sequences", 2, PP2),
}
ON_RANKS = few(ON_RANKS, "tp2 grpo", "dp2 online_dpo", "stage3 grpo", "pp2 sequences")
_EXACT = ("tokens", "supervised_tokens", "reward", "completions/length", "groups/without_signal")
_OF_JOB = {
    "grpo": ("ratio", "logprob_gap/max"),
    "sequences": ("ratio",),
    "online_dpo": ("logps/chosen", "nll/chosen"),
    "ppo": ("ratio", "critic/loss", "critic/grad_norm"),
}


def _case(name: str, job: str, ranks: int, parallel: dict[str, object], *more: str) -> Case:
    stage, words = JOBS[job]
    place = f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}", "--train.micro_batch_size=2"
    return Case(name, ranks, once([*WORDS, *words, *place, *more]), recipe=f"recipes/llama/{stage}.json")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    ones = [_case(f"{job}, dynamic", job, 1, {}) for job in JOBS]
    return run_apart(runner, [*ones, *(_case(name, *place, *PROGRAM) for name, place in ON_RANKS.items())])


@pytest.mark.parametrize("name", ON_RANKS)
def test_equals_the_dynamic_mode(runner: Runner, failed: dict[str, str], name: str) -> None:
    job = ON_RANKS[name][0]
    assert not failed.keys() & {name, f"{job}, dynamic"}, failed
    alone = runner.metrics(f"{job}, dynamic")
    found = runner.metrics(name)
    assert len(alone) == len(found) == STEPS
    assert all(record["grad_norm"] > 1e-3 for record in alone)
    for a, b in zip(alone, found):
        assert b["programs"] >= 1
        times_of_ranks = {key for key in b if key.startswith("straggler/")}
        more = {"programs", "program_seconds"} | times_of_ranks
        assert a.keys() == b.keys() - more
        assert {key: a[key] for key in _EXACT} == {key: b[key] for key in _EXACT}  # the same completions
        assert abs(a["loss"] - b["loss"]) <= LIMIT
        for key in ("grad_norm", *_OF_JOB[job]):
            # the largest gap is a difference of log-probabilities, about 1e-6
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=_absolute(key)), (a["step"], key)


def _absolute(key: str) -> float:
    return 1e-5 if key == "logprob_gap/max" else 1e-8
