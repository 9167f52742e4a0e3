"""Keys of a recipe of stage `grpo` that cancel each other."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from tests.support.grpo_case import RECIPE


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rollout.max_completion_length", ["--data.max_length=1024"]),
        ("rollout.num_generations", ["--rollout.num_generations=1"]),
        ("checkpoint.save_steps", ["--grpo.updates=4", "--checkpoint.save_steps=2"]),
        ("train.max_steps", ["--grpo.updates=3", "--checkpoint.save_steps=3", "--train.eval_steps=3"]),
        ("train.on_nonfinite", ["--train.on_nonfinite=roll_back"]),
        ("lora.base_dtype", ["--lora.rank=8", "--lora.base_dtype=nf4"]),
        ("lora.dropout", ["--lora.rank=8", "--lora.dropout=0.1"]),
        ("grpo.reference", ["--lora.rank=8", "--grpo.reference=copy", "--grpo.beta=0.1"]),
        ("grpo.reference", ["--grpo.reference=adapter_off", "--grpo.beta=0.1"]),
        ("grpo.reference", ["--grpo.reference=copy"]),
        ("grpo.beta", ["--grpo.beta=0.1"]),
        ("environment.verifiers.id", ["--environment.name=verifiers"]),
        (
            "reward.http.timeout",
            ['--reward.functions={"http": 1}', "--reward.http.url=http://here/", "--reward.http.timeout=11"],
        ),
        ("grpo.kl", ["--grpo.kl=k2"]),
        ("grpo.kl_in", ["--grpo.kl_in=reward"]),
        ("grpo.kl_in", ["--grpo.kl_in=reward", "--grpo.beta=0.1", "--grpo.reference=copy"]),
        (
            "grpo.kl",
            [
                "--grpo.kl_in=reward",
                "--grpo.beta=0.1",
                "--grpo.reference=copy",
                "--grpo.advantage=reinforce",
                "--grpo.scale_rewards=batch",
                "--grpo.kl=k2",
            ],
        ),
        ("grpo.epsilon", ["--grpo.loss=cispo", "--grpo.epsilon=0.1"]),
        ("grpo.epsilon_high", ["--grpo.loss=sapo", "--grpo.epsilon_high=0.1"]),
        ("grpo.dual_clip", ["--grpo.dual_clip=1.1"]),
        ("grpo.scale_rewards", ["--grpo.advantage=reinforce"]),
        ("rollout.max_rounds", ["--rollout.max_rounds=3"]),
        ("rollout.dynamic_sampling", ["--rollout.dynamic_sampling=true", "--rollout.num_generations=1"]),
        ("train.num_epochs", ["--rollout.dynamic_sampling=true", "--train.max_steps=null", "--train.num_epochs=1"]),
        ("train.eval_steps", ["--rollout.dynamic_sampling=true", "--train.eval_steps=epoch"]),
        ("data.num_workers", ["--data.num_workers=2"]),
        ("lora.modules_to_save", ["--lora.rank=4", '--lora.modules_to_save=["lm_head"]']),
        ("eval_rollout.pass_at", ["--eval_rollout.pass_at=[2]"]),
        ("eval_rollout.num_generations", ["--eval_rollout.num_generations=2"]),
        ("rollout.min_p", ["--rollout.min_p=0.1"]),
        ("rollout.top_p", ["--rollout.top_p=0"]),
        ("rollout.top_p", ["--rollout.top_p=0.9", "--grpo.rollout_correction=tis"]),
        (
            "rollout.top_k",
            ["--rollout.top_k=9", "--rollout.engine=openai", '--rollout.openai.urls=["http://127.0.0.1:8000"]'],
        ),
        ("grpo.count_truncated", ["--grpo.count_truncated=true"]),
        ("reward.functions", ['--reward.functions={"no_such_reward": 1}']),
        ("reward.functions", ['--reward.functions={"environment": 1}']),
        ("environment.name", ["--environment.name=no_such_environment"]),
        ("environment.name", ["--environment.name=no_such_file.py:Game"]),
        ("environment.guess.lowest", ["--environment.name=guess", "--environment.guess.lowest=10"]),
    ],
)
def test_contradicting_keys_are_rejected(registry: Registry, key: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_run(RECIPE, words, registry)
    assert key in [problem.key for problem in caught.value.problems]
