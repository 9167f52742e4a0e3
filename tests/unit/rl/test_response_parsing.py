"""Responses of a rollout server: each invalid value is refused, with its location in the message."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.inference.group_sampling import SamplingParams
from llmsuite.rl import response_parsing
from llmsuite.rl.rollout_server import RolloutServer
from llmsuite.rl.vllm_server import VllmServer
from tests.support.liar import answer, rollout

_DIGEST = "d" * 64
_VOCABULARY = 512


def _llmsuite(ids: Any, logprobs: Any) -> Any:
    prompts = [[1, 2], [1, 2], [4], [4]]
    choices = [
        {"index": i, "prompt_token_ids": prompt, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
        for i, prompt in enumerate(prompts)
    ]
    rows = [{**choice, "finish_reason": "length"} for choice in choices]
    return {"weights_version": 7, "weights_digest": _DIGEST, "choices": rows}


def _vllm(ids: Any, logprobs: Any) -> Any:
    content = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs)]
    labels = [{"version": f"7-{_DIGEST}", "start": 0, "end": 2}]
    row = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length", "weight_versions": labels}
    return {"choices": [{"index": i, **row} for i in range(2)]}


DIALECTS: dict[str, Any] = {"llmsuite": (RolloutServer, _llmsuite), "vllm": (VllmServer, _vllm)}


@contextmanager
def _served(data: Any) -> Iterator[str]:
    server = answer(data)
    try:
        yield server.url
    finally:
        server.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_valid_responses_are_parsed(dialect: str) -> None:
    kind, form = DIALECTS[dialect]
    with _served(form([0, 511], [0.9e-6, -1e4])) as url:
        groups = rollout(kind, url)
    assert [[(d.ids, d.logprobs, d.finish_reason) for d in group] for group in groups] == [
        [([0, 511], [0.0, -1e4], "length")] * 2
    ] * 2
    with _served(form([5, 6], [0, -1])) as url:  # JSON has integers too
        assert rollout(kind, url)[0][0].logprobs == [0.0, -1.0]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("token", [512, 10**9, -1, 2**64, 10**400, 5.0, True, "5", None, [5], {}, math.nan])
def test_a_token_outside_the_vocabulary_is_refused(dialect: str, token: Any) -> None:
    kind, form = DIALECTS[dialect]
    with _served(form([5, token], [-1.0, -1.0])) as url, pytest.raises(UserError) as raised:
        rollout(kind, url)
    message = str(raised.value)
    assert message.startswith(f"rollout.openai: {url} answers with wrong completions: choices[0]")
    if dialect == "llmsuite" or not isinstance(token, float):  # NaN is not what it is
        assert "token_ids[1] is " in message
        assert "the ids 0 to 511" in message or "which is not a token id" in message


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "value",
    [50, 1e300, 1.1e-6, -1e300, -1e5, math.nan, math.inf, -math.inf, 10**400, -(10**400), "-1", None, True, [-1.0]],
)
def test_an_invalid_log_probability_is_refused(dialect: str, value: Any) -> None:
    kind, form = DIALECTS[dialect]
    with _served(form([5, 6], [-1.0, value])) as url, pytest.raises(UserError) as raised:
        rollout(kind, url)
    message = str(raised.value)
    assert f"{url} answers with wrong completions: choices[0].logprobs[1] is " in message
    assert len(message) < 500


@pytest.mark.parametrize("value", [None, "choices", {}, [], [1], [[]], 7, -0.5, 10**400])
@pytest.mark.parametrize(
    "place",
    [
        ("llmsuite", "choices"),
        *[("llmsuite", "choices", 0, key) for key in ("index", "prompt_token_ids", "token_ids", "logprobs")],
        ("llmsuite", "choices", 1, "finish_reason"),
        ("llmsuite", "choices", 1, "logprobs", "token_logprobs"),
        ("vllm", "choices"),
        *[("vllm", "choices", 1, key) for key in ("index", "token_ids", "logprobs", "finish_reason")],
        ("vllm", "choices", 0, "logprobs", "content"),
        *[("vllm", "choices", 0, "logprobs", "content", 1, key) for key in ("token_id", "logprob")],
    ],
)
def test_a_field_of_another_kind_is_named(place: tuple[Any, ...], value: Any) -> None:
    kind, form = DIALECTS[place[0]]
    data = form([5, 6], [-1.0, -1.0])
    of = data
    for key in place[1:-1]:
        of = of[key]
    if place[-1] == "logprob" and value == -0.5:
        value = 0.5
    of[place[-1]] = value
    for _ in range(2):
        with _served(data) as url, pytest.raises(UserError, match=r"answers with wrong completions: .*choices"):
            rollout(kind, url)
        of.pop(place[-1], None)  # and without it


@pytest.mark.parametrize("value", [None, "a", {}, [], [1], [[]], 7])
def test_labels_of_other_kinds_are_those_of_other_weights(value: Any) -> None:
    data = _vllm([5, 6], [-1.0, -1.0])
    data["choices"][1]["weight_versions"] = value
    with _served(data) as url, pytest.raises(UserError, match=r"wrong completions|has lost the weights"):
        rollout(VllmServer, url)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_IDS = st.lists(st.integers(-2, 600) | st.integers() | _ANY, max_size=6) | _ANY
_LOGPROBS = st.lists(st.floats() | st.floats(-9, 0) | _ANY, max_size=6) | _ANY
_REASONS = st.sampled_from(["stop", "length"]) | _ANY
_ROW = st.fixed_dictionaries({}, optional={"token_ids": _IDS, "finish_reason": _REASONS})
_ROWS = st.lists(st.fixed_dictionaries({}, optional={"index": st.integers(-1, 4) | _ANY}) | _ANY, max_size=4)


@given(_ROW | _ANY, _LOGPROBS)
def test_any_response_is_a_completion_or_refused(row: Any, logprobs: Any) -> None:
    try:
        found = response_parsing.completion_of(
            row, logprobs, SamplingParams(1, 4, 1.0, 1), {2}, _VOCABULARY, "choices[0]"
        )
    except ValueError:
        return
    assert 1 <= len(found.ids) == len(found.logprobs) <= 4
    assert all(type(token) is int and 0 <= token < _VOCABULARY for token in found.ids)
    assert all(type(value) is float and -1e4 <= value <= 0 for value in found.logprobs)
    assert (found.finish_reason == "stop") == (found.ids[-1] == 2)


@given(_ROWS, st.integers(0, 4))
def test_choices_are_all_there_once_or_refused(rows: list[Any], count: int) -> None:
    try:
        found = response_parsing.choices_of({"choices": rows}, count)
    except ValueError:
        return
    assert [row["index"] for row in found] == list(range(count))
