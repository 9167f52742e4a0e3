"""Words of other suites in a recipe, or on the command line, are answered with the key that is meant."""

from __future__ import annotations

import collections

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.keys import ALIASES, UNSUPPORTED_KEYS, did_you_mean, walk
from llmsuite.recipe.recipe_class import recipe_type


def test_the_table_has_keys_and_no_word_twice(registry: Registry) -> None:
    """Its keys are keys, and no word has two meanings or is a key of its own."""
    classes = [recipe_type({"stage": stage, "model": {"family": "llama"}}, registry)[0] for stage in ("dpo", "grpo")]
    known = {info.dotted for cls in classes for info in walk(cls)}
    assert not known & set(UNSUPPORTED_KEYS)
    assert set(ALIASES) <= known
    words = collections.Counter(word for words in ALIASES.values() for word in words)
    assert [word for word, count in words.items() if count > 1] == []
    for ours, others in ALIASES.items():
        section = ours.rpartition(".")[0]
        assert not {f"{section}.{word}".lstrip(".") for word in others} & known


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lr", "did you mean 'train.learning_rate'?"),  # not lora
        ("train.lr", "did you mean 'train.learning_rate'?"),
        ("epochs", "did you mean 'train.num_epochs'?"),
        ("train.batch_size", "did you mean 'train.global_batch_size'?"),
        ("data.cutoff_len", "did you mean 'data.max_length'?"),
        ("learning_rate", "did you mean 'train.learning_rate'?"),
        ("lora.r", "did you mean 'lora.rank'?"),
        ("checkpoint.steps", "did you mean 'save_steps'?"),  # the section's own key is nearer
        ("train.max_stepz", "did you mean 'max_steps'?"),
    ],
)
def test_a_word_of_others_hints_at_the_key(key: str, hint: str, registry: Registry) -> None:
    cls, _ = recipe_type({"stage": "dpo", "model": {"family": "llama"}}, registry)
    assert did_you_mean(tuple(key.split(".")), cls) == hint


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rollout.n", "did you mean 'rollout.num_generations'?"),
        ("num_generations", "did you mean 'rollout.num_generations' or 'eval_rollout.num_generations'?"),
        ("grpo.clip_ratio_high", "did you mean 'grpo.epsilon_high'?"),
        ("grpo.delta", "did you mean 'grpo.dual_clip'?"),  # not beta
        ("reward.reward_funcs", "did you mean 'reward.functions'?"),
        ("rollout.min_p", UNSUPPORTED_KEYS["rollout.min_p"]),  # that of the section generation is for something else
    ],
)
def test_hints_of_online_rl(key: str, hint: str, registry: Registry) -> None:
    cls, _ = recipe_type({"stage": "grpo", "model": {"family": "llama"}}, registry)
    assert did_you_mean(tuple(key.split(".")), cls) == hint


def test_a_word_for_another_stage_is_no_hint(registry: Registry) -> None:
    cls, _ = recipe_type({"stage": "sft", "model": {"family": "llama"}}, registry)
    assert "dpo.beta" not in did_you_mean(("pref_beta",), cls)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "recipes/llama/dpo.json", "--lr=1e-4"]) == 2
    assert "lr: unknown key; did you mean 'train.learning_rate'?" in capsys.readouterr().err
