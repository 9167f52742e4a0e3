"""Completions that nobody samples: of the greatest length, and with a signal in every group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.engine.given_rollouts import GivenRollouts, NoEngine
from llmsuite.inference.group_sampling import SamplingParams
from llmsuite.rl.completion import Completion
from llmsuite.rl.rollouts import RolloutPrompt

PARAMS = SamplingParams(num_generations=4, max_completion_length=7, temperature=1.0, batch_size=8)
PROMPTS = [RolloutPrompt((5, 6), {"answer": "x"}, "a"), RolloutPrompt((7,), {}, "b")]


def never(completions: Sequence[Completion]) -> np.ndarray:
    raise AssertionError("rewards are not asked")


def test_completions_are_as_long_as_the_recipe_allows() -> None:
    found = GivenRollouts({0, 2}).sample(PROMPTS, 1, PARAMS, never, 2, before=PROMPTS[:1])
    assert [len(group) for group in found.groups] == [4, 4]
    completions = [completion for group in found.groups for completion in group]
    assert {tuple(completion.ids) for completion in completions} == {(1,) * 7}, "0 and 2 would end it"
    assert {len(completion.logprobs) for completion in completions} == {7}
    assert [(c.group, c.number) for c in completions] == [(g, n) for g in (1, 2) for n in range(4)]
    assert completions[0].columns == {"answer": "x"}
    # a group whose rewards are all equal would not be trained on
    assert found.scores[..., 0].tolist() == [[0, 1, 0, 1]] * 2
    assert found.scores.shape == (2, 4, 2)


def test_completions_of_later_steps_have_the_age_of_their_weights() -> None:
    rollouts = GivenRollouts([2])
    rollouts.version = 3
    rollouts.begin(PROMPTS, 5, PARAMS)
    assert rollouts.in_flight[5].version == 3
    rollouts.version = 4
    assert rollouts.sample(PROMPTS, 5, PARAMS, never, 1).version == 3
    assert rollouts.sample(PROMPTS, 6, PARAMS, never, 1).version == 4
    assert 5 not in rollouts.in_flight


def test_weights_are_gathered() -> None:
    gathered = list[str]()

    def weights() -> Any:
        for name in ("a", "b"):
            gathered.append(name)
            yield name, None

    engine = NoEngine()
    engine.refresh(0, weights())
    assert gathered == ["a", "b"]
    assert engine.begin([], PARAMS, [])() == []
    engine.close()
