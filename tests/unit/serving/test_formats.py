"""Answers in a requested format, in one batch with others of free text."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pydantic
import pytest
from starlette.testclient import TestClient

from llmsuite.serving.app import make_app
from tests.support.served import make_service

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_PERSON: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Who?"}], "seed": 3, "max_tokens": 300}


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    """A service with a model of random text, which ends where nothing else may follow."""
    service = make_service()
    decoder: Any = service.generator.decoder
    decoder.table[:, 2] = -50.0
    ends = [i for i in range(3, 400) if service.generator.tokenizer.decode([i]) in ('"', "}", "]")]
    decoder.table[:, ends] += np.float32(4)
    with TestClient(make_app(service)) as http:
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(**CHAT, response_format=AS_PERSON, n=3)
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content or "")
        assert sorted(person) == ["age", "name"]
        assert person["age"] in range(100)
    assert len({choice.message.content for choice in found.choices}) == 3


def test_json_of_no_schema(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**CHAT, response_format={"type": "json_object"}).choices
    assert isinstance(json.loads(choice.message.content or ""), dict)


def test_the_client_parses_its_own_types(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        age: int = pydantic.Field(ge=0, le=99)

    (choice,) = client.chat.completions.parse(**CHAT, response_format=Person).choices
    assert isinstance(choice.message.parsed, Person)


def test_streams_follow_it_too(client: openai.OpenAI) -> None:
    events = client.chat.completions.create(**CHAT, response_format=AS_PERSON, stream=True)
    assert sorted(json.loads("".join(event.choices[0].delta.content or "" for event in events))) == ["age", "name"]


def test_free_answers_of_the_same_batch_stay_as_they_are(client: openai.OpenAI) -> None:
    def said(more: dict[str, Any]) -> str:
        return str(client.chat.completions.create(**{**CHAT, **more}).choices[0].message.content)

    free = {"max_tokens": 120}
    alone = said(free)
    bound = said({"response_format": AS_PERSON})
    assert alone[0] != "{"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(said, [free, {"response_format": AS_PERSON}, free, {"response_format": AS_PERSON}]))
    assert found == [alone, bound, alone, bound]


def test_a_call_that_has_to_be(client: openai.OpenAI) -> None:
    names = []
    for seed in range(6):
        body = {**CHAT, "tools": TOOLS, "seed": seed, "max_tokens": 1000}
        (choice,) = client.chat.completions.create(**body, tool_choice="required").choices
        calls: Any = choice.message.tool_calls
        assert (choice.finish_reason, bool(calls)) == ("tool_calls", True), choice.message.content
        names += [call.function.name for call in calls]
        persons = [json.loads(call.function.arguments) for call in calls if call.function.name == "add"]
        assert all(sorted(person) == ["age", "name"] for person in persons)
    assert set(names) == {"add", "now"}
    one: Any = {"type": "function", "function": {"name": "now"}}
    (choice,) = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice=one).choices
    assert [call.function.name for call in choice.message.tool_calls or () if call.type == "function"] == ["now"]


def test_calls_that_may_be_fit_what_is_strict(client: openai.OpenAI) -> None:
    """The model calls or answers as it likes; the client parses what it says into its own types either way."""

    class Answer(pydantic.BaseModel):
        text: str = pydantic.Field(max_length=6)

    class Add(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        age: int = pydantic.Field(ge=0, le=99)

    tools: Any = [openai.pydantic_function_tool(Add, name="add")]
    decode = make_service().generator.tokenizer.decode
    for begin, calls_it in (("{", False), ("<", True)):  # what the model would rather begin with
        liked: Any = {i: 50 for i in range(3, 400) if decode([i]).startswith(begin)}
        for seed in range(3):
            body = {**CHAT, "seed": seed, "max_tokens": 1000, "logit_bias": liked}
            (choice,) = client.chat.completions.parse(**body, tools=tools, response_format=Answer).choices
            calls = choice.message.tool_calls or []
            assert all(isinstance(call.function.parsed_arguments, Add) for call in calls)
            assert (bool(calls), isinstance(choice.message.parsed, Answer)) == (calls_it, not calls_it)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema has to be given"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}}},
            "response_format: Invalid type: objekt",
        ),
        ({"response_format": AS_PERSON, "extra_body": {"min_tokens": 3}}, "min_tokens: not with response_format"),
        ({"response_format": AS_PERSON, "tools": TOOLS, "tool_choice": "required"}, "response_format: not with"),
        ({"tools": TOOLS, "response_format": AS_PERSON, "extra_body": {"min_tokens": 3}}, "min_tokens: not with"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice: asks for a call of a tool that is not in tools",
        ),
        ({"tool_choice": "required"}, "tool_choice: asks for a call"),
    ],
)
def test_what_cannot_be_followed_is_refused(client: openai.OpenAI, change: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{**CHAT, **change})
