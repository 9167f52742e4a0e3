"""Untrusted bodies: their cost is bounded before validation, and nothing large runs in the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import HTTPException
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.serving import bodies, faults, service
from llmsuite.serving.app import make_app
from llmsuite.serving.bodies import MAX_DEPTH, MAX_ENTRIES, MAX_KEYS, MAX_PARTS, check_parts, validate_body
from llmsuite.serving.embeddings import EmbeddingRequest
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.responses import COUNT_PATH, ResponseRequest
from llmsuite.serving.tokens import DetokenizeRequest, TokenizeRequest
from llmsuite.serving.training import TokenIdsRequest, UpdateRequest
from tests.support.served import make_service

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSE = "/v1/responses"
VECTOR = "/v1/embeddings"
MODELS = (
    ChatRequest, CompletionRequest, ResponseRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest,
    TokenIdsRequest,
    UpdateRequest,
)  # fmt: skip
SIZE = 1_000_000
MOST_FAULTS = 16 * MAX_KEYS
"""Most faults that pydantic may create for one body: several objects in it may have the most unknown keys."""


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app(make_service())) as made:
        yield made


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Number of faults that were created, and that were formatted."""
    return count_work(monkeypatch)


def count_work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counted = {"made": 0, "worded": 0}
    words = faults._describe
    tell = faults.faults

    def counting_words(fault: Any) -> str:
        counted["worded"] += 1
        return words(fault)

    def counting_faults(kind: type[BaseModel], error: ValidationError) -> str:
        counted["made"] += error.error_count()
        return tell(kind, error)

    monkeypatch.setattr(faults, "_describe", counting_words)
    monkeypatch.setattr(bodies, "faults", counting_faults)
    return counted


def filled(key: str, entry: str, more: str = "") -> bytes:
    """A body of 1 MB whose key has a list of one entry over and over."""
    head = f'{{{more}"{key}":['
    tail = "]}"
    return (head + ",".join([entry] * ((SIZE - len(head) - 2) // (len(entry) + 1))) + tail).encode()


def keys(more: str) -> bytes:
    count = 50_000
    return ("{" + more + ",".join(f'"max_token{number}":1' for number in range(count)) + "}").encode()


MANY = f"it has to have at most {MAX_ENTRIES:,}"
PARTS = f"texts, lists and objects; it has to have at most {MAX_PARTS:,}"
HOSTILE = {
    "floats": (TEXT, filled("prompt", "1.5"), "prompt: has ", MANY),
    "lists-of-a-float": (TEXT, filled("prompt", "[1.5]"), "the body: has ", PARTS),
    "empty-lists": (TEXT, filled("prompt", "[]"), "the body: has ", PARTS),
    "stops": (TEXT, filled("stop", '""', '"prompt":"a",'), "the body: has ", PARTS),
    "unknown-keys": (TEXT, keys('"prompt":"a",'), "the body: has 50,001 keys", f"at most {MAX_KEYS:,}"),
    "biases": (
        TEXT,
        b'{"prompt":"a","logit_bias":' + keys("") + b"}",
        "logit_bias: has 50,000 keys",
        f"at most {MAX_KEYS:,}",
    ),
    "messages": (CHAT, filled("messages", "1"), "messages: has ", MANY),
    "tools-of-chats": (CHAT, filled("tools", "1", '"messages":[],'), "tools: has ", MANY),
    "tools": (RESPONSE, filled("tools", "1", '"input":"a",'), "tools: has ", MANY),
    "items": (RESPONSE, filled("input", "1"), "input: has ", MANY),
    "items-counted": (COUNT_PATH, filled("input", "{}"), "the body: has ", PARTS),
    "includes": (RESPONSE, filled("include", '"a"', '"input":"a",'), "the body: has ", PARTS),
    "vectors": (VECTOR, filled("input", "1.5"), "input: has ", MANY),
    "texts": ("/detokenize", filled("tokens", '"a"'), "the body: has ", PARTS),
    "no-text": ("/tokenize", filled("prompt", "null"), "prompt: has ", MANY),
    "deep": (CHAT, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", "messages[0][0]", f"more than {MAX_DEPTH} lists"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_much_is_named_with_its_bound(client: TestClient, work: dict[str, int], name: str) -> None:
    path, body, place, bound = HOSTILE[name]
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert said.startswith(place)
    assert bound in said
    assert len(said) < 500
    assert work == {"made": 0, "worded": 0}, "refused before it is validated"


ENTRIES = ["1", "1.5", '"a"', "[]", "{}", "[1.5]", "[[1]]", '{"a":1}', "null", "true", '{"type":"function"}', '["a"]']


def shaped(model: type[BaseModel]) -> st.SearchStrategy[bytes]:
    """Bodies with the keys of a model, whose values are as many as pass the bounds, or a few more."""
    names = st.sampled_from([*model.model_fields, "unknown"])
    counts = st.sampled_from([1, 100, MAX_KEYS, MAX_ENTRIES, MAX_ENTRIES + 1, 60_000])
    lists = st.builds(lambda entry, count: f"[{','.join([entry] * count)}]", st.sampled_from(ENTRIES), counts)
    objects = st.builds(
        lambda entry, count: "{" + ",".join(f'"key{number}":{entry}' for number in range(count)) + "}",
        st.sampled_from(ENTRIES),
        st.sampled_from([1, MAX_KEYS, MAX_KEYS + 1]),
    )
    nested = st.builds(lambda value, depth: "[" * depth + value + "]" * depth, lists, st.integers(0, 70))
    parts = st.dictionaries(names, lists | objects | nested, min_size=1, max_size=4)
    return parts.map(lambda found: ("{" + ",".join(f'"{k}":{v}' for k, v in found.items()) + "}").encode())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_body_is_more_than_some_faults(model: type[BaseModel], data: st.DataObject) -> None:
    body = data.draw(shaped(model))
    with pytest.MonkeyPatch.context() as patch:
        counted = count_work(patch)
        said = ""
        try:
            validate_body(body, lambda content: model, 4096)
        except HTTPException as error:
            said = str(error.detail)
    assert len(said) < 2000
    assert counted["made"] <= MOST_FAULTS
    assert counted["worded"] <= 5


def test_every_list_of_a_request_is_left_at_its_first_fault() -> None:
    def lists(schema: Any) -> Iterator[Any]:
        for value in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(value, (dict, list, tuple)):
                yield from lists(value)
        if isinstance(schema, dict) and schema.get("type") == "list":
            yield schema

    found = [schema for model in MODELS for schema in lists(model.__pydantic_core_schema__)]
    assert len(found) > 10
    assert [schema for schema in found if not schema.get("fail_fast")] == []


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda part: st.lists(part, max_size=5) | st.dictionaries(st.text(max_size=5), part, max_size=5),
    ),
    st.booleans(),
)
def test_parts_are_counted_as_they_are(content: Any, ascii_only: bool) -> None:
    def parts(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(1 + parts(entry) for entry in value.values())
        return 1 + sum(map(parts, value)) if isinstance(value, list) else isinstance(value, str)

    written = json.dumps(content, ensure_ascii=ascii_only)
    count = parts(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_PARTS", count)
        check_parts(written)
        patch.setattr(bodies, "MAX_PARTS", count - 1)
        with pytest.raises(HTTPException, match=f"has {count:,} texts, lists and objects"):
            check_parts(written)


def test_large_bodies_are_read_outside_the_event_loop(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def reads(*given: Any) -> Any:
        seen.append(threading.get_ident())
        return validate_body(*given)

    monkeypatch.setattr(service, "validate_body", reads)
    assert client.portal is not None
    loop = client.portal.call(threading.get_ident)
    for path, key in ((TEXT, "prompt"), (VECTOR, "input"), (RESPONSE, "input"), ("/tokenize", "prompt")):
        client.post(path, json={key: "a" * bodies.MAX_INLINE_BYTES})
    client.post(CHAT, json={"messages": [{"role": "user", "content": "a" * bodies.MAX_INLINE_BYTES}]})
    client.post("/detokenize", json={"tokens": [7] * bodies.MAX_INLINE_BYTES})
    assert len(seen) == 6
    assert loop not in seen


def test_texts_and_tokens_are_made_outside_the_event_loop(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[int]] = {}

    def noting(name: str) -> Any:
        own = getattr(TextTokenizer, name)

        def noted(self: TextTokenizer, *given: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return own(self, *given)

        return noted

    for name in ("encode", "decode", "pieces"):
        monkeypatch.setattr(TextTokenizer, name, noting(name))
    assert client.portal is not None
    loop = client.portal.call(threading.get_ident)
    turns = [{"role": "user", "content": "Hi"}]
    for path, body in (
        (TEXT, {"prompt": "Hi", "max_tokens": 3, "echo": True, "logprobs": 2, "stream": False}),
        (TEXT, {"prompt": [[5, 6]], "max_tokens": 3, "echo": True, "stream": True}),
        (CHAT, {"messages": turns, "max_tokens": 3, "logprobs": True, "top_logprobs": 3}),
        (RESPONSE, {"input": "Hi", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}),
        (COUNT_PATH, {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi there", "return_token_strs": True}),
        ("/detokenize", {"tokens": [7, 8]}),
    ):
        assert client.post(path, json=body).status_code == (400 if body.get("echo") and "logprobs" in body else 200)
    assert seen.keys() == {"encode", "decode", "pieces"}
    assert loop not in set.union(*seen.values())
