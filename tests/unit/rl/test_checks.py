"""Checks of numbers from untrusted functions, environments, servers and engines."""

from __future__ import annotations

import decimal
import fractions
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import AgreedError, UserError
from llmsuite.contract.specs import Reply, Turn
from llmsuite.inference.group_sampling import SampledCompletion, SampleRequest, SamplingParams
from llmsuite.parallel import collective
from llmsuite.rl import checks
from llmsuite.rl.environments import Step, handle_call
from llmsuite.rl.reward_http import http
from llmsuite.rl.reward_sections import HttpSection
from llmsuite.rl.reward_worker import scored
from llmsuite.rl.rollouts import RolloutPrompt, Rollouts
from tests.support.liar import answer
from tests.support.reward_case import Making, completion, functions

LARGEST = float(np.finfo("float32").max)
GOOD = [0, 1.5, True, LARGEST, -LARGEST, 5e-324, np.float32(2), np.int64(3), np.array(4.0), fractions.Fraction(1, 2)]
BAD = {
    "not finite": [math.nan, math.inf, -math.inf, np.float32("inf"), decimal.Decimal("Infinity")],
    "too large": [1e39, -1e300, 10**39, 10**400, -(10**5000), np.float64(1e300), decimal.Decimal("1e60")],
    "not a number": ["1", b"1", [1.0], set(), 1j, object(), np.zeros(2)],
}
BAD_VALUES = [(value, why) for why, values in BAD.items() for value in values]


def test_the_bounds_are_those_of_float32() -> None:
    assert checks.LARGEST == LARGEST
    assert [checks.number_of(value) for value in GOOD] == [float(value) for value in GOOD]


@pytest.mark.parametrize(("value", "why"), BAD_VALUES, ids=lambda value: f"{type(value).__name__}")
def test_an_invalid_number_is_named(value: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why) as raised:
        checks.number_of(value)
    assert len(str(raised.value)) < 300


@given(st.floats() | st.integers() | st.decimals(allow_nan=False) | st.fractions())
def test_an_accepted_number_is_finite_in_float32(value: Any) -> None:
    try:
        found = checks.number_of(value)
    except ValueError:
        return
    assert np.isfinite(np.float32(found))


@pytest.mark.parametrize(("value", "why"), BAD_VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_reward_with_an_invalid_value_is_missing_and_the_others_are_not(value: Any, why: str) -> None:
    rows, why_missing = scored(lambda given: [1.0, value, 2.0], (), [completion("4", i) for i in range(3)])
    assert rows == [[1.0], [None], [2.0]]
    assert why_missing.startswith("it returned ")
    assert why in why_missing


def test_only_the_invalid_part_of_a_reward_is_missing() -> None:
    rows, why_missing = scored(
        lambda given: [{"score": 1.0, "a": 1e300}, {"score": 1.0, "a": 2}], ("a",), [completion("4")] * 2
    )
    assert rows == [[1.0, None], [1.0, 2.0]]
    assert not why_missing


def test_a_sum_that_float32_cannot_hold_is_missing(make: Making, tmp_path: Path) -> None:
    file = functions(
        tmp_path, "def large(completions):\n    return [3e38 if c.text == 'x' else 1.0 for c in completions]\n"
    )
    rewards = make({f"{file}:large": 2.0}, max_failed=0.4)
    scores = rewards.score([completion("x"), completion("y", 1)])
    assert scores.ravel().tolist() == [3e38, 1.0]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rewards.total(scores), [np.nan, 2.0])
    with pytest.raises(
        AgreedError, match=r"of 2 completions 1 or more .*: a weighted sum of rewards is 6e\+38; float32"
    ):
        rewards.check(scores)


class Gives:
    """An environment that gives one of the values above as the reward, or as a part of it."""

    def __init__(self, number: int, is_part: bool):
        self.number = number
        self.is_part = is_part

    def begin(self, row: Any, seed: int) -> Any:
        return row["messages"]

    def step(self, turn: Turn) -> Reply:
        value: Any = BAD_VALUES[self.number][0]
        return Reply(done=True, reward={"score": 1.0, "a": value} if self.is_part else value)


@pytest.mark.parametrize("number", range(len(BAD_VALUES)))
@pytest.mark.parametrize("is_part", [False, True])
def test_an_episode_with_such_a_reward_fails_and_such_a_part_is_missing(number: int, is_part: bool) -> None:
    call = Step(pickle.dumps(Gives(number, is_part)), Turn(text="a", ids=(1,), finish_reason="stop"))
    why = BAD_VALUES[number][1]
    found, why_missing = handle_call(lambda: Gives(0, False), ("a",) if is_part else (), call)
    if is_part and why != "not a number":
        assert found is not None
        np.testing.assert_array_equal(found.scores, [1.0, np.nan])
    else:
        assert found is None
        assert "its reward is " in why_missing
        assert why in why_missing


@pytest.mark.parametrize(("dialect", "key"), [("paddlenlp", "score"), ("openrlhf", "rewards")])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, 10**400, "1", None, [1.0], {}])
def test_a_score_of_a_server_that_is_none_is_named(dialect: Any, key: str, value: Any) -> None:
    server = answer({"error_code": 0, key: [1, value]})
    score = http(HttpSection(url=server.url, dialect=dialect, retries=0))
    try:
        rows, why_missing = scored(score, (), [completion("4"), completion("5", 1)])
    finally:
        server.close()
    assert rows == [[1.0], [None]]
    assert why_missing.startswith(f"{server.url}: {key}[1] is ")


# engines of plugins

PARAMS = SamplingParams(num_generations=2, max_completion_length=3, temperature=1.0, batch_size=4)
FINE = SampledCompletion(np.zeros(0), [5, 6], [-0.5, 0.0], "length")


def _rollouts(monkeypatch: pytest.MonkeyPatch, *sampled: SampledCompletion) -> Any:
    """Rollouts of one prompt, by an engine that returns these completions."""
    monkeypatch.setattr(collective, "mesh", lambda: SimpleNamespace(loader_ranks=[0]))
    engine: Any = SimpleNamespace(begin=lambda requests, sampling_params, stop_ids: lambda: [list(sampled)])
    return Rollouts(engine, {2}, str, seed=0, vocab_size=512)


WRONG = [
    ({"ids": [5, 512]}, r"completion 1 of prompt 0: ids\[1\] is 512; the vocabulary has the ids 0 to 511"),
    ({"ids": [-1, 5]}, r"ids\[0\] is -1"),
    ({"ids": [5.0, 6]}, r"ids\[0\] is 5.0, which is not a token id"),
    ({"ids": None}, r"ids is None, not a list"),
    ({"ids": [5]}, "has 1 tokens and 2 log-probabilities"),
    ({"ids": [], "logprobs": []}, "has 0 tokens; 1 to 3 were requested"),
    ({"ids": [5] * 4, "logprobs": [0.0] * 4}, "has 4 tokens; 1 to 3 were requested"),
    ({"logprobs": [-1.0, 1e300]}, r"logprobs\[1\] is 1e\+300"),
    ({"logprobs": np.array([np.nan, 0.0])}, r"logprobs\[0\] is nan"),
    ({"finish_reason": None}, "finish_reason is None"),
]


@pytest.mark.parametrize(("more", "why"), WRONG, ids=range(len(WRONG)))
def test_an_invalid_completion_of_a_plugin_engine_is_named(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], why: str
) -> None:
    given: dict[str, Any] = {"uniforms": np.zeros(0), "ids": [5, 6], "logprobs": [-0.5, 0.0], "finish_reason": "length"}
    made = _rollouts(monkeypatch, FINE, SampledCompletion(**{**given, **more}))
    with pytest.raises(UserError, match=rf"^rollout.engine: its answer is wrong: .*{why}"):
        made.sample([RolloutPrompt((1, 2))], 1, PARAMS, lambda completions: np.zeros([2, 1]), 1)


def test_an_engine_that_returns_too_few_completions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _rollouts(monkeypatch, FINE)
    with pytest.raises(UserError, match=r"has \[1\] completions of the prompts, not \[2\]"):
        made.sample([RolloutPrompt((1, 2))], 1, PARAMS, lambda completions: np.zeros([2, 1]), 1)


def test_turns_of_an_engine_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _rollouts(monkeypatch)

    def fill(requests: Any, groups: Any, sampling_params: Any, stop_ids: Any) -> None:
        groups[0][0].ids = [512]
        groups[0][0].logprobs = [0.0]
        groups[0][0].finish_reason = "length"

    made._engine.fill_completions = fill
    with pytest.raises(UserError, match=r"completion 0 of prompt 0: ids\[0\] is 512"):
        made._sample_turns([SampleRequest((1,), (2,))], [[SampledCompletion(np.zeros(3))]], PARAMS)
