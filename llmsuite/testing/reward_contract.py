"""Contract of a reward as one assertion: its keys are documented, it loads in a process without Paddle, and each
completion gets one finite number, the same each time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.contract.registry import load_plugins
from llmsuite.contract.specs import RewardSpec
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_worker import RewardSource, scored
from llmsuite.testing.descriptions import assert_described


def assert_reward_contract(
    reward: str,
    texts: Sequence[str],
    *,
    columns: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> list[float]:
    """Raise AssertionError with the broken rule unless a registered reward fulfils the contract. Takes no training.

    Args:
        reward: name of the reward.
        texts: completions of one prompt, without their stop tokens.
        columns: the other columns of the prompt's row, such as its answer.
        keys: values of the reward's own keys; else their defaults.

    Returns:
        The reward of each text.
    """
    registry = load_plugins()
    assert reward in registry.rewards, registry.unknown("reward", reward)
    spec = registry.rewards[reward]
    assert not spec.needs_services, f"{reward} needs services of a run, such as a model; test it by a run"
    section = _section(spec, keys or {})
    source = RewardSource(reward, pickle.dumps((spec.factory, section)), spec.parts)
    completions = [_completion(text, number, columns or {}) for number, text in enumerate(texts)]
    found = _scores(spec, source, completions)
    assert _scores(spec, source, completions) == found, f"{reward} gives the same completions other numbers"
    return found


def _section(spec: RewardSpec, keys: Mapping[str, Any]) -> Any:
    """The keys of the reward, each with a description."""
    assert spec.help.strip(), "RewardSpec.help is empty"
    if spec.config_cls is None:
        assert not keys, f"{spec.name} has no keys"
        return None
    assert_described(spec.config_cls)
    return spec.config_cls(**keys)


def _completion(text: str, number: int, columns: Mapping[str, Any]) -> Completion:
    """A completion with one token for each word."""
    ids = list(range(len(text.split()) + 1))
    return Completion(
        prompt_ids=[1],
        ids=ids,
        logprobs=[-1.0] * len(ids),
        finish_reason="stop",
        text=text,
        columns=columns,
        group=0,
        number=number,
        prompt="A prompt.",
    )


def _scores(spec: RewardSpec, source: RewardSource, completions: Sequence[Completion]) -> list[float]:
    """Rewards by a newly loaded function, called as a run calls it."""
    score = source.load()
    at_once = spec.level == "group" or spec.runs == "main"
    calls = [completions] if at_once else [[one] for one in completions]
    found = []
    for call in calls:
        values, why = scored(score, spec.parts, call)
        assert not why, f"{spec.name}: {why}"
        for value, *parts in values:
            assert value is not None
            assert None not in parts, f"{spec.name}: a part of {', '.join(spec.parts)} is missing"
            found.append(value)
    return found
