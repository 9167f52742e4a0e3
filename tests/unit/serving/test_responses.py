"""/v1/responses gives what chats give, as the openai client reads it, whole and as a stream."""

from __future__ import annotations

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
from tests.support.tool_calls import CALLS, TOOLS, says

CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "Who?"}], "seed": 3}
ASK: dict[str, Any] = {"model": "toy", "input": "Who?", "max_output_tokens": 20, "extra_body": {"seed": 3}}
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    service = make_service()
    decoder: Any = service.generator.decoder
    decoder.table[:, 2] = -50.0
    ends = [i for i in range(3, 400) if service.generator.tokenizer.decode([i]) in ('"', "}", "]")]
    decoder.table[:, ends] += np.float32(4)
    with TestClient(make_app(service)) as http:
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)


def test_the_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**CHAT, max_tokens=20)
    found = client.responses.create(**ASK)
    assert found.output_text == chat.choices[0].message.content
    assert (found.status, found.model) == ("incomplete", "toy")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert chat.usage is not None
    counts = (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens)
    assert counts == (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens)
    turns = [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]
    reported = client.chat.completions.create(**{**CHAT, "messages": turns}, max_tokens=20)
    assert client.responses.create(**ASK, instructions="Be brief.").usage.input_tokens == reported.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_stream_ends_with_the_whole(client: openai.OpenAI) -> None:
    alone = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    begin = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    end = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert (kinds[:4], kinds[-4:]) == (begin, end)
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == alone.output_text
    with client.responses.stream(**ASK) as stream:
        for event in stream:
            if event.type == "response.incomplete":
                assert event.response.output_text == alone.output_text


def test_types_of_the_client(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        age: int = pydantic.Field(ge=0, le=99)

    found = client.responses.parse(**{**ASK, "max_output_tokens": 300}, text_format=Person)
    assert isinstance(found.output_parsed, Person)
    assert found.status == "completed"


def test_calls_and_what_came_of_them() -> None:
    seen: list[list[int]] = []
    turns: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]}]
    with says(f"Let me see.\n{CALLS}", seen) as client:
        found = client.responses.create(model="toy", input=turns, tools=FLAT)
        calls = found.output[1:]
        assert found.output_text == "Let me see."
        names = [(call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"]
        assert names == [("add", {"a": 1}), ("sum", {})]
        turns += [item.model_dump(exclude_none=True) for item in found.output]
        turns += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
            for call in calls
            if call.type == "function_call"
        ]
        client.responses.create(model="toy", input=turns, tools=FLAT)
        # the same conversation as a chat
        chat = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "1+1?"}], tools=TOOLS)
        own: Any = chat.choices[0].message.model_dump(exclude_none=True)
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "2"}
            for call in chat.choices[0].message.tool_calls or ()
        ]
        client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "1+1?"}, own, *results], tools=TOOLS
        )
        assert seen[0] == seen[2]
        assert seen[1] == seen[3] != seen[0]
        events = list(client.responses.create(model="toy", input="1+1?", tools=FLAT, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"a": 1}, {}]
    assert [event.output_index for event in done] == [1, 2]
    (last,) = [event for event in events if event.type == "response.completed"]
    assert [item.type for item in last.response.output] == ["message", "function_call", "function_call"]
    assert last.response.output_text == "Let me see.\n"


INCLUDED: Any = {"include": ["message.output_text.logprobs"]}


def logprobs_of(response: Any) -> list[Any]:
    """Log-probabilities of the only text of a response, as plain values."""
    (message,) = [item for item in response.output if item.type == "message"]
    (part,) = message.content
    return [entry.model_dump() for entry in part.logprobs]


def test_logprobs_are_those_of_a_chat(client: openai.OpenAI) -> None:
    for count in (0, 3):
        chat = client.chat.completions.create(**CHAT, max_tokens=20, logprobs=True, top_logprobs=count)
        found = client.responses.create(**ASK, **INCLUDED, top_logprobs=count)
        reported: Any = chat.choices[0].logprobs
        entries = logprobs_of(found)
        assert entries == [entry.model_dump() for entry in reported.content]
        assert [len(entry["top_logprobs"]) for entry in entries] == [count] * 20
        assert {key for entry in entries for key in entry} == {"token", "bytes", "logprob", "top_logprobs"}
        assert {key for e in entries for top in e["top_logprobs"] for key in top} <= {"token", "bytes", "logprob"}
        assert found.top_logprobs == count
    assert logprobs_of(client.responses.create(**ASK, **INCLUDED)) == [{**e, "top_logprobs": []} for e in entries]
    # a number of likely tokens is at most so many of what is included, and here nothing is
    alone = client.responses.create(**ASK, top_logprobs=3)
    assert (alone.output_text, alone.top_logprobs, logprobs_of(alone)) == (found.output_text, 3, [])
    events = list(client.responses.create(**ASK, top_logprobs=3, stream=True))
    assert [event.logprobs for event in events if event.type == "response.output_text.done"] == [[]]
    # an answer with them is a turn of the next request
    turns: Any = [
        {"role": "user", "content": "Who?"},
        found.output[0].model_dump(),
        {"role": "user", "content": "Why?"},
    ]
    plain: Any = [*turns[:1], {"role": "assistant", "content": found.output_text}, *turns[2:]]
    texts = [client.responses.create(**{**ASK, "input": given}).output_text for given in (turns, plain)]
    assert texts[0] == texts[1]


def test_events_have_the_logprobs_of_their_tokens(client: openai.OpenAI) -> None:
    body = {**ASK, **INCLUDED, "top_logprobs": 2}
    full = logprobs_of(client.responses.create(**body))
    events = list(client.responses.create(**body, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.model_dump() for event in deltas for entry in event.logprobs] == full
    assert all(event.logprobs for event in deltas)
    assert len(deltas) > 1
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.model_dump() for entry in done.logprobs] == full
    (part,) = [event.part for event in events if event.type == "response.content_part.done"]
    assert part.model_dump()["logprobs"] == full
    (last,) = [event for event in events if event.type == "response.incomplete"]
    assert logprobs_of(last.response) == full
    with client.responses.stream(**body) as stream:
        of_helper = [event for event in stream if event.type == "response.output_text.delta"]
    assert [len(event.logprobs) for event in of_helper] == [len(event.logprobs) for event in deltas]


@pytest.mark.parametrize("text", ["Let me see.\n", "I ❤ <b> and <tool boxes>: ", ""])
@pytest.mark.parametrize("after", ["", " Then?"])
def test_logprobs_of_a_text_end_where_calls_begin(text: str, after: str) -> None:
    with says(f"{text}{CALLS}{after}") as client:
        body: Any = {"model": "toy", "input": "1+1?", "tools": FLAT, **INCLUDED}
        found = client.responses.create(**body)
        events = list(client.responses.create(**body, stream=True))
    if not text + after:
        assert {item.type for item in found.output} == {"function_call"}
        assert not [event for event in events if event.type.startswith("response.output_text")]
        return
    reported = logprobs_of(found)
    assert b"".join(bytes(entry["bytes"]) for entry in reported).decode() == text
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == text + after.strip()
    assert [entry.model_dump() for event in deltas for entry in event.logprobs] == reported
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.model_dump() for entry in done.logprobs] == reported


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    alone = client.responses.create(**ASK)
    idle: Any = {"truncation": "auto", "max_tool_calls": 0, "include": ["file_search_call.results"]}
    found = client.responses.create(**ASK, **idle)
    assert found.output_text == alone.output_text
    assert (alone.truncation, found.truncation) == ("disabled", "auto")
    long = "word " * 9000
    with pytest.raises(openai.BadRequestError, match="the model's context length is 4096"):
        client.responses.create(**{**ASK, "input": long}, truncation="auto")


def test_tokens_of_an_input_are_counted() -> None:
    with says("Yes.") as client:
        full: Any = {"model": "toy", "instructions": "Be brief.", "input": "Who?", "tools": FLAT}
        made = client.responses.create(**full)
        assert made.usage is not None
        assert client.responses.input_tokens.count(**full).input_tokens == made.usage.input_tokens
        assert client.responses.input_tokens.count(input="Who?").input_tokens < made.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="needs role"):
            client.responses.input_tokens.count(input=[{"role": "wizard", "content": "Hi"}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"include": ["message.output_text.logprob"]}, r"include\[0\]: has to be 'message\.output_text\.logprobs'"),
        ({"top_logprobs": 21}, "top_logprobs: is 21; it has to be at most 20"),
        ({**INCLUDED, "top_logprobs": -1}, "top_logprobs: is -1; it has to be at least 0"),
        ({**INCLUDED, "top_logprobs": "2"}, "top_logprobs: has to be an integer, and is a string"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]: type 'item_reference' is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            r"input\[0\]\.content\[0\]' is a part of",
        ),
        ({"input": [{"role": "user", "content": 1}]}, r"input\[0\]\.content: a text is needed, or a list of parts"),
        ({"input": [{"role": "wizard", "content": "Hi"}]}, "needs role"),
        ({"input": []}, "input: has to be a text or a list of items, at least one"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format: name and schema"),
        ({"tool_choice": "required"}, "tool_choice: asks for a call"),
    ],
)
def test_what_is_not_done_is_refused(client: openai.OpenAI, change: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{**ASK, **change})
