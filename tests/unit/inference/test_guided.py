"""Grammars: every answer that is sampled with one follows it, whatever the model prefers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference import guided
from llmsuite.inference.guided import Grammars, Guide
from llmsuite.inference.tool_calls import ToolCallFormat
from tests.support.paths import DATA

STOPS = {2, 0}
TOKENIZER = TextTokenizer(DATA / "tokenizer")
VOCAB = TOKENIZER.vocab_size + 8
GRAMMARS = Grammars(TOKENIZER, VOCAB, STOPS)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": PERSON}}
NOW = {"type": "function", "function": {"name": "now"}}
TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
}
TAGGED = ToolCallFormat("<tool_call>", "</tool_call>", "name", "arguments")
BARE = ToolCallFormat("", "", "name", "parameters")

ENDS = np.zeros(VOCAB, "float32")
ENDS[[i for i in range(TOKENIZER.vocab_size) if TOKENIZER.decode([i]) in ('"', "}", "]")]] = 4
"""Makes texts and objects end after a while."""


def sample_text(guide: Guide, seed: int, most: int = 400) -> str:
    """A random text that the grammar allows, ending as soon as it may."""
    random = np.random.default_rng(seed)
    ids = []
    while len(ids) < most:
        logits = guide.apply(random.normal(0, 1, VOCAB).astype("float32") + ENDS)
        if np.isfinite(logits[list(STOPS)]).any():
            return TOKENIZER.decode(ids)
        ids.append(int(logits.argmax()))
        guide.accept(ids[-1])
    raise AssertionError(f"no end in {most} tokens: {TOKENIZER.decode(ids)!r}")


def refusal(make: Callable[[], Guide]) -> str:
    with pytest.raises(UserError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_json_of_a_schema(seed: int) -> None:
    found = json.loads(sample_text(GRAMMARS.from_schema(PERSON, "response_format"), seed))
    assert sorted(found) == ["age", "name"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 8
    assert found["age"] in range(100)


def test_any_object() -> None:
    assert isinstance(json.loads(sample_text(GRAMMARS.from_schema({"type": "object"}, "response_format"), 0)), dict)


def test_copies_go_on_by_themselves() -> None:
    guide = GRAMMARS.from_schema({"enum": ["aaa", "bbb"]}, "response_format")
    texts = {sample_text(guide.copy(), seed) for seed in range(12)}
    assert texts == {'"aaa"', '"bbb"'}


@pytest.mark.parametrize("form", [TAGGED, BARE], ids=["tagged", "bare"])
@pytest.mark.parametrize("several", [True, False])
def test_calls_are_those_that_are_read(form: ToolCallFormat, several: bool) -> None:
    names = set()
    for seed in range(6):
        text = sample_text(GRAMMARS.tool_calls(form, [ADD, NOW], several), seed)
        said, calls = form.parse(text, ["add", "now"])
        assert (said, 1 <= len(calls) <= (guided.MAX_CALLS if several else 1)) == ("", True), text
        names |= {call.name for call in calls}
        for call in calls:
            if call.name == "add":
                assert sorted(json.loads(call.arguments)) == ["age", "name"]
    assert names == {"add", "now"}


def guide_after(guide: Guide, text: str) -> Guide:
    """The guide after a text, which it has to allow."""
    for token in TOKENIZER.encode(text):
        assert guide.allowed()[token], f"{TOKENIZER.decode([token])!r} of {text!r}"
        guide.accept(token)
    return guide


def is_allowed(guide: Guide, text: str) -> bool:
    """True if a text may follow, to its end."""
    for token in TOKENIZER.encode(text):
        if not guide.allowed()[token]:
            return False
        guide.accept(token)
    return bool(guide.allowed()[list(STOPS)].any())


STRICT_ADD = {"type": "function", "function": {**ADD["function"], "strict": True}}  # type: ignore[dict-item]
GOOD = '{"name": "add", "%s": {"name": "a", "age": 3}}'
WRONG = '{"name": "add", "%s": {"name": "a"}}'


@pytest.mark.parametrize(
    ("form", "text", "is_right"),
    [
        (TAGGED, "", True),
        (TAGGED, "I do not know.\nYou < I [1] {2}", True),
        (TAGGED, f"Let me see. <tool_call>{GOOD % 'arguments'}</tool_call>", True),
        (
            TAGGED,
            f"<tool_call>\n{GOOD % 'arguments'}\n</tool_call> and <tool_call>{GOOD % 'arguments'}</tool_call>.",
            True,
        ),
        (TAGGED, f"<tool_call>{WRONG % 'arguments'}</tool_call>", False),
        (TAGGED, f"<tool_call>{GOOD % 'arguments'}</tool_call> <tool_call>{WRONG % 'arguments'}</tool_call>", False),
        (TAGGED, "<tool_call> is how I call tools", False),
        (TAGGED, '<tool_call>{"name": "now", "arguments": {"zone": [1]}}</tool_call>', True),
        (BARE, "I do not know {or do I}.", True),
        (BARE, " \n", True),
        (BARE, GOOD % "parameters", True),
        (BARE, f"[{GOOD % 'parameters'}, {GOOD % 'parameters'}]", True),
        (BARE, WRONG % "parameters", False),
        (BARE, "{braces}", False),
        (BARE, f"\u00a0{WRONG % 'parameters'}", False),
        (BARE, f"\x1c{WRONG % 'parameters'}", False),
    ],
)
def test_calls_that_may_be(form: ToolCallFormat, text: str, is_right: bool) -> None:
    """Arguments of strict tools have to fit the parameters; other tools take any."""
    assert is_allowed(GRAMMARS.text_or_tool_calls(form, [STRICT_ADD, NOW]), text) == is_right


@pytest.mark.parametrize("form", [TAGGED, BARE], ids=["tagged", "bare"])
def test_a_call_that_is_begun_is_right(form: ToolCallFormat) -> None:
    for seed in range(4):
        head = f'{form.start_marker}{{"name": "add", "'
        guide = guide_after(GRAMMARS.text_or_tool_calls(form, [STRICT_ADD, NOW]), head)
        said, calls = form.parse(head + sample_text(guide, seed), ["add", "now"])
        assert (said, [sorted(json.loads(call.arguments)) for call in calls]) == ("", [["age", "name"]])


def test_text_of_a_schema_or_calls() -> None:
    schema = {"type": "array", "items": {"type": "string"}}
    for text, is_right in {
        json.dumps(["a"]): True,
        "a": False,
        f"<tool_call>{GOOD % 'arguments'}</tool_call>": True,
        f"<tool_call>{WRONG % 'arguments'}</tool_call>": False,
    }.items():
        assert is_allowed(GRAMMARS.text_or_tool_calls(TAGGED, [STRICT_ADD], schema), text) == is_right, text
    said = refusal(lambda: GRAMMARS.text_or_tool_calls(BARE, [STRICT_ADD], schema))
    assert said.startswith("response_format: not with tools that are strict"), said


def test_references_stay_within_a_tool() -> None:
    tool = {"type": "function", "function": {"name": "grow", "parameters": TREE}}
    _, (call,) = TAGGED.parse(sample_text(GRAMMARS.tool_calls(TAGGED, [NOW, tool][1:], False), 1), ["grow"])
    assert "root" in json.loads(call.arguments)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"type": "string", "pattern": "(("}, "response_format: "),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"not": {}}, "not"),
        (nested(300), "recursion limit"),
        ({"enum": ["x" * 100] * 1000}, "response_format: is 104,"),
        (
            {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(8)]} for i in range(8)]},
            "schema too large",
        ),
    ],
)
def test_schemas_that_are_refused(schema: dict[str, Any], message: str) -> None:
    found = refusal(lambda: GRAMMARS.from_schema(schema, "response_format"))
    assert message in found
    assert found.startswith("response_format: ")
    assert "\n" not in found


def test_tools_that_are_refused() -> None:
    wrong = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "no"}}}}}
    assert "tools: parameters of 'bad': Invalid type" in refusal(
        lambda: GRAMMARS.tool_calls(TAGGED, [ADD, wrong], True)
    )
    large = {"type": "function", "function": {"name": "b", "parameters": {"properties": {"x" * 60000: {}}}}}
    assert "bytes together" in refusal(lambda: GRAMMARS.tool_calls(TAGGED, [large] * 3, True))


def test_an_answer_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = GRAMMARS.from_schema(PERSON, "response_format")
    monkeypatch.setattr(guided, "_BUDGET", 0.0)
    with pytest.raises(UserError, match="response_format: following it takes too long"):
        sample_text(guide, 0)


def test_a_model_without_a_tokenizer_of_the_library() -> None:
    class Elsewhere:
        directory = DATA / "sft"

    grammars = Grammars(Elsewhere(), VOCAB, STOPS)  # type: ignore[arg-type]
    assert "response_format: needs a model with a tokenizer.json" in refusal(
        lambda: grammars.from_schema(PERSON, "response_format")
    )
