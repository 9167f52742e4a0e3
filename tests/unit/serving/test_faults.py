"""Faults of a request are reported in terms of the API and of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmsuite.serving.app import make_app
from tests.support.served import make_service

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSE = "/v1/responses"
VECTOR = "/v1/embeddings"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    TEXT: {"prompt": "Hi", "max_tokens": 4},
    RESPONSE: {"input": "Hi", "max_output_tokens": 4},
    VECTOR: {"input": "Hi"},
}
LONG = "word " * 9000
STOP = "a string of 1 to 1000 characters, or a list of at most 16 of them"
PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists"
CHOICE = '"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
SCHEMA = {"type": "json_schema"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app(make_service())) as made:
        yield made


def fault(client: TestClient, path: str, body: Any) -> str:
    answer = client.post(path, json=body)
    assert answer.status_code in (400, 404, 405), answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        (CHAT, {"messages": "Hi"}, "messages: has to be a list, and is a string"),
        (CHAT, {"temperature": "hot"}, "temperature: has to be a number, and is a string"),
        (CHAT, {"temperature": -1}, "temperature: is -1; it has to be at least 0"),
        (CHAT, {"n": 1.5}, "n: has to be an integer, and is 1.5"),
        (CHAT, {"n": True}, "n: has to be an integer, and is true"),
        (CHAT, {"stop": 3}, f"stop: has to be {STOP}"),
        (CHAT, {"stop": [""]}, f"stop: has to be {STOP}"),
        (CHAT, {"stream": "yes"}, "stream: has to be true or false, and is a string"),
        (CHAT, {"max_token": 3}, "max_token: is not known here; did you mean max_tokens?"),
        (CHAT, {"audio": {}}, "audio: is not supported here; leave it out"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions: is not supported here; leave it out"),
        (CHAT, {"response_format": "json"}, "response_format: has to be an object, and is a string"),
        (
            CHAT,
            {"response_format": SCHEMA},
            "response_format: json_schema has to be given with type json_schema, and only then",
        ),
        (CHAT, {"tools": ["x"]}, "tools[0]: has to be an object, and is a string"),
        (CHAT, {"tool_choice": "any"}, f"tool_choice: has to be {CHOICE}"),
        (CHAT, {"tool_choice": {"name": "f"}}, f"tool_choice: has to be {CHOICE}"),
        (
            CHAT,
            {"logit_bias": {"05": 1}},
            "logit_bias: has to be an object of at most 1,024 token ids, with a number between -100 and 100 for each",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ["a"]}]},
            "'messages[0].content[0]' is a string; a part is an object with type and text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "'messages[0].content[0].text' is an integer, not text",
        ),
        (CHAT, {"max_completion_tokens": 5}, "max_tokens: is 4, and max_completion_tokens is 5; give one of them"),
        (CHAT, {"max_tokens": 5000}, "max_tokens: is 5000; this server gives at most 4000"),
        (
            CHAT,
            {"max_tokens": None, "max_completion_tokens": 5000},
            "max_completion_tokens: is 5000; this server gives at most 4000",
        ),
        (CHAT, {"min_tokens": 9}, "min_tokens: is 9; an answer has at most 4 tokens (max_tokens)"),
        (TEXT, {"prompt": 3}, f"prompt: has to be {PROMPT}"),
        (TEXT, {"prompt": ["a", 3]}, f"prompt: has to be {PROMPT}"),
        (TEXT, {"prompt": ""}, "prompt: the prompt has no tokens; the model needs at least one"),
        (TEXT, {"suffix": "x"}, "suffix: is not supported here; leave it out"),
        (RESPONSE, {"input": 3}, "input: has to be a string, or a list of items, each an object"),
        (RESPONSE, {"input": [{"role": "bot", "content": "x"}]}, "input[0]: needs role, one of "),
        (
            RESPONSE,
            {"input": [{"type": "function_call", "name": "f"}]},
            "'input[0]' has a call of f whose arguments are no JSON object",
        ),
        (RESPONSE, {"max_output_tokens": 5000}, "max_output_tokens: is 5000; this server gives at most 4000"),
        (RESPONSE, {"background": True}, "background: has to be false"),
        (
            RESPONSE,
            {"text": {"format": SCHEMA}},
            "text.format: name and schema have to be given with type json_schema, and only then",
        ),
        (
            RESPONSE,
            {"text": {"format": {**SCHEMA, "name": "a b", "schema": {}}}},
            "text.format.name: is 'a b'; it has to match ^[a-zA-Z0-9_-]{1,64}$",
        ),
        (VECTOR, {"input": []}, "input: has to be a string, a list of 1 to 2048 strings, "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_is_said_in_words_of_json(client: TestClient, path: str, change: dict[str, Any], says: str) -> None:
    said = fault(client, path, {**GOOD[path], **change})
    assert said == says or (says.endswith(" ") and said.startswith(says))


def test_a_body_that_is_no_object_is_said(client: TestClient) -> None:
    assert fault(client, CHAT, [1]) == "the body: has to be an object, and is a list"
    assert fault(client, CHAT, {}) == "messages: is missing"


@pytest.mark.parametrize(
    ("path", "change", "key", "option"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages", None),
        (CHAT, {"messages": [{"role": "user", "content": LONG[:1000]}], "max_tokens": 4000}, "messages", "max_tokens"),
        (TEXT, {"prompt": LONG}, "prompt", None),
        (TEXT, {"prompt": ["a", LONG]}, "prompt[1]", None),
        (RESPONSE, {"input": LONG[:1000], "max_output_tokens": 4000}, "input", "max_output_tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_prompt_without_room_is_refused_with_the_context_length(
    client: TestClient, path: str, change: dict[str, Any], key: str, option: str | None
) -> None:
    said = fault(client, path, {**GOOD[path], **change})
    assert said.startswith(f"{key}: the prompt has ")
    assert said.endswith("; the model's context length is 4096, of prompt and answer together")
    assert (f", and {option} asks for 4000 more: at most " in said) == (option is not None)
    assert "max_new_tokens" not in said


def test_an_address_that_is_not_there_is_named(client: TestClient) -> None:
    said = fault(client, CHAT.removeprefix("/v1"), {})
    assert said == (
        "Not Found: POST /chat/completions does not exist, but /v1/chat/completions does: the base URL of clients ends "
        "with /v1"
    )
    assert fault(client, "/v1/audio/speech", {}) == "Not Found: POST /v1/audio/speech does not exist"
    assert fault(client, "/v1/models", {}) == "Method Not Allowed: POST /v1/models does not exist"
