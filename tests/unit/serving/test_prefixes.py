"""Requests that begin alike, such as with the same system prompt: the same answers, computed from where they part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.generate import Generator
from llmsuite.inference.prompts import Prompter
from llmsuite.serving.app import make_app
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from tests.support.served_adapters import TARGETS, adapted, write_base_and_adapters

SYSTEM = list(range(100, 140))
NAMES = ("base", *TARGETS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and its adapters."""
    return write_base_and_adapters(tmp_path_factory.mktemp("adapters"))


def served(place: Path, megabytes: int) -> Iterator[TestClient]:
    tokenizer = TextTokenizer(place / "base")
    limits = Limits(prefix_cache_mb=megabytes)
    generator = Generator(adapted(place), tokenizer, stop_ids=set())
    with TestClient(make_app(Service(generator, Prompter(tokenizer, "chatml"), "base", limits, Metrics()))) as client:
        yield client


@pytest.fixture
def client(place: Path) -> Iterator[TestClient]:
    yield from served(place, 1)


@pytest.fixture
def without(place: Path) -> Iterator[TestClient]:
    yield from served(place, 0)


def ask(client: TestClient, name: str, *more: int, **others: Any) -> str:
    body = {"model": name, "prompt": [*SYSTEM, *more], "max_tokens": 10, "temperature": 0, **others}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def counted(client: TestClient, name: str) -> float:
    (found,) = re.findall(rf"^llmsuite_prefix_{name} ([\d.e+]+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found)


def test_answers_are_those_without_and_adapters_apart(client: TestClient, without: TestClient) -> None:
    for number in (7, 8, 9):
        for name in NAMES:
            assert ask(client, name, number, 5) == ask(without, name, number, 5), (name, number)
    assert len({ask(client, name, 7, 5) for name in NAMES}) == len(NAMES), "else any adapter would do"
    assert counted(client, "hits_total") == 3 * len(NAMES), "the first of each adapter is none"
    assert counted(client, "tokens_total") == 32 * 3 * len(NAMES), "full blocks of 32"
    assert 0 < counted(client, "bytes") <= 1_000_000
    assert counted(without, "hits_total") == 0


def test_several_answers_and_streams(client: TestClient, without: TestClient) -> None:
    for _ in range(2):
        more: dict[str, Any] = {"temperature": 1, "seed": 5, "n": 3}
        assert ask(client, "a", 3, **more) == ask(without, "a", 3, **more)
        body = {"model": "b", "prompt": [*SYSTEM, 9], "max_tokens": 6, "temperature": 0, "stream": True}
        assert _text(client, body) == _text(without, body)
    assert counted(client, "hits_total") == 2 + 4, (
        "of the first three answers two wait for the one that reads the prompt"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_usage_reports_cached_tokens(client: TestClient, without: TestClient, stream: bool) -> None:
    def cached(where: TestClient, prompt: Any, **more: Any) -> int:
        usage = _usage(where, "/v1/completions", {"prompt": prompt, "max_tokens": 2, **more}, stream)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(client, [*SYSTEM, 7, 5]) for _ in range(2)] == [0, 32]
    assert cached(client, [[*SYSTEM, 1], [*SYSTEM, 2]]) == 2 * 32, "of each prompt"
    assert cached(client, [*SYSTEM[::-1], 1], n=3) == 0, "a prompt counts once, by the answer that read it"
    assert cached(client, [*SYSTEM[:20], *SYSTEM]) == 0
    assert [cached(without, [*SYSTEM, 7, 5]) for _ in range(2)] == [0, 0]


def test_responses_and_chats_tell_it_too(client: TestClient) -> None:
    message = "every request begins with this, and with that, and then with this"
    turns = [{"role": "system", "content": message}, {"role": "user", "content": "Hi"}]
    chat = {"messages": turns, "max_tokens": 2}
    response = {"instructions": message, "input": "Ho", "max_output_tokens": 2}
    first = _usage(client, "/v1/chat/completions", chat, False)
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert first["prompt_tokens"] > 32
    for stream in (False, True):
        usage = _usage(client, "/v1/responses", response, stream)
        details = usage["input_tokens_details"]
        full = usage["input_tokens"] // 32 * 32
        assert 32 <= details["cached_tokens"] <= full
        assert details["cached_tokens"] % 32 == 0
        wrote = full - details["cached_tokens"]
        assert details["cache_write_tokens"] == wrote or usage["input_tokens"] == full, "blocks that were not there"
    assert details["cache_write_tokens"] == 0, "of the same prompt once more"


def _usage(client: TestClient, path: str, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Token counts of an answer."""
    if not stream:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])
    options = {} if "responses" in path else {"stream_options": {"include_usage": True}}
    lines = client.post(path, json={**body, **options, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (found,) = [usage for event in events if (usage := event.get("usage") or event.get("response", {}).get("usage"))]
    return dict(found)


def _text(client: TestClient, body: dict[str, Any]) -> list[str]:
    lines = client.post("/v1/completions", json=body).text.splitlines()
    return re.findall(r'"text": ?"(.*?)"', "\n".join(lines))
