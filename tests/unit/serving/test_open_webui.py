"""Requests of Open WebUI 0.12.4, without it: as its page sent them in a conversation, shortened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmsuite.inference.prompts import Prompter
from llmsuite.serving.app import make_app
from llmsuite.serving.service import Service
from tests.support.served import make_service

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# two of its 36, which come with every message unless "Builtin Tools" is off for the model
TOOLS = [
    {"type": "function", "function": {
        "name": "get_current_timestamp",
        "description": "Get the current Unix timestamp in seconds.",
        "parameters": {"properties": {}, "type": "object"},
    }},
    {"type": "function", "function": {
        "name": "search_memories",
        "description": "Search the user's memories.",
        "parameters": {"properties": {"query": {"type": "string"}}, "required": ["query"], "type": "object"},
    }},
]  # fmt: skip
CHAT: dict[str, Any] = {"stream": True, "model": "toy", "messages": QUESTION, "tools": TOOLS}
TITLE = '### Task:\nGenerate a concise title summarizing the chat history.\n### Output:\nJSON format: { "title": "" }'


@pytest.fixture
def service() -> Service:
    """A service with a model whose chat template supports no tools."""
    made = make_service()
    made.prompter = Prompter(made.generator.tokenizer, "plain")
    return made


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service)) as http:
        yield http


def test_its_models_are_those_served(client: TestClient) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["toy"]


def test_tools_that_the_model_does_not_know_are_refused_with_the_way_out(client: TestClient) -> None:
    refused = client.post("/v1/chat/completions", json=CHAT)
    assert (refused.status_code, "--leave_out_tools" in refused.json()["error"]["message"]) == (400, True)


def test_a_conversation_without_them(client: TestClient, service: Service) -> None:
    service.leaves_out_tools = True
    asked = {**CHAT, "max_tokens": 8, "seed": 1}
    streamed = client.post("/v1/chat/completions", json=asked)
    assert streamed.status_code == 200
    assert streamed.text.endswith("data: [DONE]\n\n")
    plain = {key: value for key, value in asked.items() if key != "tools"}
    full = [client.post("/v1/chat/completions", json={**one, "stream": False}).json() for one in (asked, plain)]
    texts = [one["choices"][0]["message"]["content"] for one in full]
    assert texts[0] == texts[1] != ""
    has_to = client.post("/v1/chat/completions", json={**asked, "tool_choice": "required"})
    assert has_to.status_code == 400, "a call that has to be is never left out"


def test_titles_and_turns_that_failed(client: TestClient) -> None:
    title = {"model": "toy", "messages": [{"role": "user", "content": TITLE}], "stream": False, "max_tokens": 1000}
    assert client.post("/v1/chat/completions", json=title).status_code == 200
    # a message that got no answer stays in the conversation there
    twice = {"model": "toy", "messages": [*QUESTION, *QUESTION], "stream": True, "max_tokens": 4}
    assert client.post("/v1/chat/completions", json=twice).text.endswith("data: [DONE]\n\n")
