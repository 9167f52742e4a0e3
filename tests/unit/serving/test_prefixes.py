"""Requests that begin alike, such as with the same system prompt: the same answers, computed from where they part."""

from __future__ import annotations

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
from tests.unit.serving.test_adapters import TARGETS, adapted, place

__all__ = ["place"]  # the fixture
SYSTEM = list(range(100, 140))
NAMES = ("base", *TARGETS)


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
    asked = {"model": name, "prompt": [*SYSTEM, *more], "max_tokens": 10, "temperature": 0, **others}
    answer = client.post("/v1/completions", json=asked)
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
    assert counted(client, "tokens_total") == 32 * 3 * len(NAMES), "whole blocks of 32"
    assert 0 < counted(client, "bytes") <= 1_000_000
    assert counted(without, "hits_total") == 0


def test_several_answers_and_streams(client: TestClient, without: TestClient) -> None:
    for _ in range(2):
        more: dict[str, Any] = {"temperature": 1, "seed": 5, "n": 3}
        assert ask(client, "a", 3, **more) == ask(without, "a", 3, **more)
        asked = {"model": "b", "prompt": [*SYSTEM, 9], "max_tokens": 6, "temperature": 0, "stream": True}
        assert _text(client, asked) == _text(without, asked)
    assert counted(client, "hits_total") == 4


def _text(client: TestClient, asked: dict[str, Any]) -> list[str]:
    lines = client.post("/v1/completions", json=asked).text.splitlines()
    return re.findall(r'"text": ?"(.*?)"', "\n".join(lines))
