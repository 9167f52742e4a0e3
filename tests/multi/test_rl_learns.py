"""Stages that draw raise the reward they are given: directions, by margins that no rounding decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multi.conftest import Runner

STEPS = 30
REWARD = '''
def even(completions):
    """The share of tokens with an even number: one half of those that are drawn at random."""
    return [sum(token % 2 == 0 for token in c.ids) / len(c.ids) for c in completions]
'''
WORDS = (
    "--smoke", "--parallel={}", "--launch.num_devices=1", f"--train.max_steps={STEPS}", "--train.global_batch_size=16",
    "--train.micro_batch_size=16", "--train.learning_rate=0.003", "--train.lr_schedule=constant",
    "--train.warmup_ratio=0", "--data.max_length=64", "--data.eval=null", "--rollout.max_completion_length=8",
    f"--checkpoint.save_steps={STEPS}",
)  # fmt: skip
STAGES = {
    "grpo": (),
    "ppo": ("--ppo.critic.learning_rate=0.003", "--ppo.reference=none", "--ppo.beta=0"),
}


def learnt_by(runner: Runner, folder: Path, stage: str, *words: str) -> list[dict[str, float]]:
    (folder / "even.py").write_text(REWARD)
    functions = f'--reward.functions={{"{folder}/even.py:even": 1.0, "format": 0.0}}'
    where = f"--output_dir={runner.directory / stage}"
    runner.run("run", f"recipes/llama/{stage}.json", *WORDS, *STAGES[stage], functions, where, *words)
    return runner.metrics(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_the_reward_rises(runner: Runner, tmp_path: Path, stage: str) -> None:
    records = learnt_by(runner, tmp_path, stage)
    rewards = np.array([record["reward"] for record in records])
    assert len(rewards) == STEPS
    assert 0.4 < rewards[:3].mean() < 0.6
    assert rewards[-5:].mean() > 0.8
    if stage == "ppo":  # the critic has come to expect it: an untrained one would be off by the whole reward
        errors = np.array([record["critic/error"] for record in records])
        assert errors[-5:].mean() < 0.3
