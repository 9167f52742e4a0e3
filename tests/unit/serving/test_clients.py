"""Requests of client libraries: keys that do not change answers are accepted, all others are supported or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from llmsuite.serving.app import make_app
from tests.support.served import make_service

TURNS: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
CHAT: dict[str, Any] = {"model": "toy", "messages": TURNS, "max_tokens": 12, "seed": 3}
TEXT: dict[str, Any] = {"model": "toy", "prompt": ["What is", "Why?"], "max_tokens": 12, "seed": 3}


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with TestClient(make_app(make_service())) as http:
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)


def said(client: openai.OpenAI, **more: Any) -> str:
    return str(client.chat.completions.create(**{**CHAT, **more}).choices[0].message.content)


STRICT: list[Any] = [{"type": "function", "function": {"name": "now", "strict": True}}]
IDLE: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "store": True,
    "metadata": {"run": "7"},
    "user": "somebody",
    "safety_identifier": "somebody",
    "service_tier": "auto",
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "Hello"},
    "verbosity": "medium",
    "logit_bias": {},
    "response_format": {"type": "text"},
    "audio": None,
    "reasoning_effort": None,
}


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    alone = said(client)
    assert alone
    for key, value in IDLE.items():
        assert said(client, **{key: value}) == alone, key
    assert said(client, **IDLE) == alone


def test_strict_tools_that_cannot_be_called_change_nothing(client: openai.OpenAI) -> None:
    assert said(client, tools=STRICT, tool_choice="none") == said(client)


def test_every_whole_number_of_64_bits_is_a_seed(client: openai.OpenAI) -> None:
    seeds = [-(2**63), -3, 3, 2**63 - 1]
    answers = {said(client, seed=seed, temperature=1) for seed in seeds for _ in range(2)}
    assert len(answers) == len(seeds)


def test_a_model_has_all_its_names() -> None:
    service = make_service()
    service.aliases = ("gpt-x", "org/other")
    with TestClient(make_app(service)) as http:
        client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)
        assert [model.id for model in client.models.list()] == ["toy", "gpt-x", "org/other"]
        assert [model.to_dict().get("root") for model in client.models.list()] == [None, "toy", "toy"]
        answers = {said(client, model=name) for name in ("toy", "gpt-x", "org/other")}
        assert len(answers) == 1
        for name in ("toy", "org/other"):
            assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError, match="model 'z' is not served here") as caught:
            client.models.retrieve("z")
        assert caught.value.code == "model_not_found"
        assert client.chat.completions.create(**{**CHAT, "model": "gpt-x"}).model == "gpt-x"
        metrics = http.get("/metrics").text
        assert 'path="/v1/models",status="404"' in metrics
        assert "org/other" not in metrics


def test_a_developer_is_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service()
    seen = list[list[int]]()
    make_sequence = service.generator.make_sequence
    monkeypatch.setattr(
        service.generator, "make_sequence", lambda ids, *more: seen.append(list(ids)) or make_sequence(ids, *more)
    )
    with TestClient(make_app(service)) as http:
        for role in ("system", "developer", "user"):
            asked = {**CHAT, "messages": [{**TURNS[0], "role": role}, TURNS[1]]}
            assert http.post("/v1/chat/completions", json=asked).status_code == 200
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort: is not supported here; leave it out"),
        ({"seed": -(2**63) - 1}, "seed: "),
        ({"verbosity": "low"}, "verbosity: "),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options: "),
        ({"metadata": {"a": "x" * 1001}}, "metadata"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias: has token 999999999; the model's vocabulary ends at "),
        ({"extra_body": {"wisdom": 1}}, "wisdom: is not known here"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_would_change_it_is_refused(client: openai.OpenAI, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        said(client, **change)


def test_biases_are_added_to_logits(client: openai.OpenAI) -> None:
    def sampled_ids(**more: Any) -> list[int]:
        found = client.completions.create(**{**TEXT, "prompt": [5], "temperature": 0, "logprobs": 0, **more})
        (choice,) = found.choices
        assert choice.logprobs is not None
        return [len(choice.logprobs.tokens or ()), *map(ord, choice.text)]

    alone = sampled_ids()
    assert sampled_ids(logit_bias={"300": 100}) != alone
    forced = client.completions.create(**{**TEXT, "prompt": [5], "logit_bias": {"300": 100}}).choices[0].text
    word = make_service().generator.tokenizer.decode([300] * 12)
    assert forced == word
    other = client.completions.create(**{**TEXT, "prompt": [5], "logit_bias": {"300": -100}, "n": 4})
    assert all(make_service().generator.tokenizer.decode([300]) not in choice.text for choice in other.choices)


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    alone = [choice.text for choice in client.completions.create(**TEXT, n=2).choices]
    full = [choice.text for choice in client.completions.create(**TEXT, n=2, echo=True).choices]
    prompts = ["What is", "What is", "Why?", "Why?"]
    assert full == [prompt + text for prompt, text in zip(prompts, alone)]
    streamed = [""] * 4
    for event in client.completions.create(**TEXT, n=2, echo=True, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == full
    with pytest.raises(openai.BadRequestError, match="echo: not with logprobs"):
        client.completions.create(**TEXT, echo=True, logprobs=1)


def test_the_best_of_several_is_given(client: openai.OpenAI) -> None:
    every = client.completions.create(**TEXT, n=5, logprobs=0)
    means = [float(np.mean(choice.logprobs.token_logprobs)) for choice in every.choices if choice.logprobs]
    expected = []
    for begin in (0, 5):
        order = sorted(range(begin, begin + 5), key=lambda i: -means[i])
        expected += [every.choices[i].text for i in order[:2]]
    best = client.completions.create(**TEXT, n=2, best_of=5)
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.choices[0].logprobs is None
    assert best.usage == every.usage
    many = ["a"] * 9
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 16, "prompt": many}):
        with pytest.raises(openai.BadRequestError, match=r"best_of: |144 answers are more than 128"):
            client.completions.create(**{**TEXT, **wrong})
