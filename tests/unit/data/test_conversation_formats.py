"""Every shape of conversation rows: what it becomes, and what is said of a faulty one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.data.conversation_formats import BUILTIN, alpaca, openai, paddlenlp, sharegpt, trl_completion
from llmsuite.data.read import read_rows
from llmsuite.data.rows import Conversation, Message, ToolCall
from llmsuite.data.turns import parse_message
from tests.support.fields import fields
from tests.support.paths import REAL

FORMATS = {f.name: f for f in BUILTIN}

SYSTEM = Message("system", "Be brief.")
ASK = Message("user", "Hi?")
SAY = Message("assistant", "Hello.")
AGAIN = Message("user", "And?")
MORE = Message("assistant", "Bye.")
ONE = Conversation((ASK, SAY), (False, True))
TWO = Conversation((ASK, SAY, AGAIN, MORE), (False, True, False, True))
NAMES = [("user", "Hi?", "Ann"), ("assistant", "Hello.", "Bob")]
NAMED = Conversation(
    tuple(parse_message({"role": role, "content": text, "name": name}, "turn") for role, text, name in NAMES),
    (False, True),
)
SECOND = Conversation(TWO.messages, (False, False, False, True))
WEIGHTED = dataclasses.replace(TWO, weights=(0.0, 0.5, 0.0, 1.0))

ADD = {"name": "add", "parameters": {"type": "object"}}
TOOLS = json.dumps([{"type": "function", "function": ADD}])
CALL = Message("assistant", "", (ToolCall("add", '{"a": 1}'),))
CALLED = Conversation((ASK, CALL, Message("tool", "3"), SAY), (False, True, False, True), TOOLS)


def with_system(row: Conversation) -> Conversation:
    return Conversation((SYSTEM, *row.messages), (False, *row.supervised), row.tools)


def said(*pairs: tuple[str, str], **last: Any) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"from": speaker, "value": text} for speaker, text in pairs]
    turns[-1] |= last
    return turns


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


OPENAI_CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
PADDLENLP_TWO = {"src": ["Hi?", "And?"], "tgt": ["Hello.", "Bye."]}
ALPACA = {"instruction": "Hi?", "input": "", "output": "Hello."}
SHAREGPT_TWO = said(("human", "Hi?"), ("gpt", "Hello."), ("human", "And?"), ("gpt", "Bye."))
SHAREGPT_CALL = said(
    ("human", "Hi?"),
    ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
    ("observation", "3"),
    ("gpt", "Hello."),
)
OPENAI_TWO = [turn("user", "Hi?"), turn("assistant", "Hello."), turn("user", "And?"), turn("assistant", "Bye.")]
OPENAI_TOOLS = [
    turn("user", "Hi?"),
    turn("assistant", None, tool_calls=[OPENAI_CALL]),
    turn("tool", "3"),
    turn("assistant", "Hello."),
]

PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i?"}]
PICTURE = {"type": "image_url", "image_url": {"url": "a.png"}}

Convert = Callable[[Any], Conversation]
ACCEPTED: list[tuple[Convert, dict[str, Any], Conversation]] = [
    (paddlenlp, {"src": "Hi?", "tgt": "Hello."}, ONE),
    (paddlenlp, {"src": ["Hi?"], "tgt": ["Hello."], "system": "Be brief."}, with_system(ONE)),
    (paddlenlp, PADDLENLP_TWO, TWO),
    (paddlenlp, {**PADDLENLP_TWO, "label": [0, 1]}, SECOND),
    (alpaca, ALPACA, ONE),
    (alpaca, {"instruction": "Hi?", "output": "Hello."}, ONE),
    (alpaca, {**ALPACA, "system": "Be brief."}, with_system(ONE)),
    (alpaca, {**ALPACA, "input": "You!"}, Conversation((Message("user", "Hi?\nYou!"), SAY), (False, True))),
    (alpaca, {**ALPACA, "history": ""}, ONE),
    (alpaca, {"instruction": "And?", "input": "", "output": "Bye.", "history": [["Hi?", "Hello."]]}, TWO),
    (sharegpt, {"conversations": SHAREGPT_TWO}, TWO),
    (sharegpt, {"conversations": SHAREGPT_TWO, "system": "Be brief.", "tools": ""}, with_system(TWO)),
    (sharegpt, {"conversations": SHAREGPT_CALL, "tools": json.dumps([ADD])}, CALLED),
    (
        sharegpt,
        {"conversations": [*said(("human", "Hi?"), ("gpt", "Hello."), loss=False), *SHAREGPT_TWO[2:]]},
        SECOND,
    ),
    (openai, {"messages": OPENAI_TWO}, TWO),
    (openai, {"messages": [turn("system", "Be brief."), *OPENAI_TWO]}, with_system(TWO)),
    (openai, {"messages": [turn("user", "Hi?", name="Ann"), turn("assistant", "Hello.", name="Bob")]}, NAMED),
    (
        trl_completion,
        {"prompt": [turn("user", "Hi?", name="Ann")], "completion": [turn("assistant", "Hello.", name="Bob")]},
        NAMED,
    ),
    (openai, {"messages": [turn("user", PARTS), turn("assistant", [{"type": "text", "text": "Hello."}])]}, ONE),
    (trl_completion, {"prompt": [turn("user", PARTS)], "completion": "Hello."}, ONE),
    (openai, {"messages": [OPENAI_TWO[0], turn("assistant", "Hello.", weight=0), *OPENAI_TWO[2:]]}, SECOND),
    (openai, {"messages": [turn("user", "Hi?", weight=0), turn("assistant", "Hello.", weight=1)]}, ONE),
    (openai, {"messages": [OPENAI_TWO[0], turn("assistant", "Hello.", weight=0.5), *OPENAI_TWO[2:]]}, WEIGHTED),
    (
        openai,
        {"messages": [OPENAI_TWO[0], turn("assistant", "Hello.", weight=0.5, loss=True), *OPENAI_TWO[2:]]},
        WEIGHTED,
    ),
    (
        sharegpt,
        {"conversations": [SHAREGPT_TWO[0], {**SHAREGPT_TWO[1], "weight": 0.5}, *SHAREGPT_TWO[2:]]},
        WEIGHTED,
    ),
    (
        trl_completion,
        {"prompt": "Hi?", "completion": [turn("assistant", "Hello.", weight=2)]},
        dataclasses.replace(ONE, weights=(0.0, 2.0)),
    ),
    (openai, {"messages": OPENAI_TOOLS, "tools": [{"type": "function", "function": ADD}]}, CALLED),
]


@pytest.mark.parametrize(("convert", "row", "expected"), ACCEPTED)
def test_accepted_rows_are_converted(convert: Convert, row: dict[str, Any], expected: Conversation) -> None:
    assert fields(convert(row)) == fields(expected)


def call(value: str) -> dict[str, Any]:
    return {"conversations": said(("human", "a"), ("function_call", value))}


def calls(value: Any) -> dict[str, Any]:
    return {"messages": [turn("assistant", None, tool_calls=value)]}


REFUSED: list[tuple[Convert, dict[str, Any], str]] = [
    (paddlenlp, {"src": ["a", "b"], "tgt": ["c"]}, "'src' has 2 turns and 'tgt' 1; every src needs its tgt"),
    (paddlenlp, {"src": [], "tgt": []}, "'src' has 0 turns and 'tgt' 0"),
    (paddlenlp, {"src": 1, "tgt": "a"}, "'src' is not text or a list of texts"),
    (paddlenlp, {**PADDLENLP_TWO, "label": [1]}, "'label' is [1]; a list with 0 or 1 for each of the 2 'tgt'"),
    (paddlenlp, {**PADDLENLP_TWO, "label": [1, 2]}, "'label[1]' is 2; 0 or 1 is needed"),
    (alpaca, {**ALPACA, "output": None}, "'output' is null, not text"),
    (alpaca, {"instruction": "a", "input": "b"}, "has no key 'output'"),
    (paddlenlp, {"src": "a"}, "has no key 'tgt'"),
    (alpaca, {**ALPACA, "input": ["a"]}, "'input' is a list, not text"),
    (alpaca, {**ALPACA, "history": "a"}, "'history' is a string, not a list of [question, answer]"),
    (alpaca, {**ALPACA, "history": [["a"]]}, "'history[0]' is not [question, answer]"),
    (sharegpt, {"conversations": []}, "'conversations' is not a list of turns"),
    (sharegpt, {"conversations": ["a"]}, "'conversations[0]' is not an object with 'from'"),
    (sharegpt, {"conversations": said(("bot", "a"))}, "'conversations[0]' has the unknown role 'bot'"),
    (sharegpt, {"conversations": [{"from": "gpt"}]}, "'conversations[0]' has no key 'value'"),
    (sharegpt, call("add(1)"), "'conversations[1].value' is not JSON"),
    (sharegpt, call("[]"), "'conversations[1].value' is empty"),
    (sharegpt, call('{"arguments": {}}'), "'conversations[1].value' has a call without a name"),
    (sharegpt, {"conversations": SHAREGPT_TWO, "tools": "{"}, "'tools' is not JSON"),
    (sharegpt, {"conversations": SHAREGPT_TWO, "tools": [{}]}, "'tools[0]' is not a function with a name"),
    (sharegpt, {"conversations": SHAREGPT_TWO, "tools": {}}, "'tools' is an object, not a list of functions"),
    (openai, {"messages": "a"}, "'messages' is not a list of turns"),
    (openai, {"messages": [turn("user", "a", name=1)]}, "'messages[0].name' is an integer, not text"),
    (openai, {"messages": [turn("human", "a")]}, "'messages[0]' has the unknown role 'human'"),
    (openai, {"messages": [turn("user", None)]}, "'messages[0].content' is null, not text"),
    (
        openai,
        {"messages": [turn("user", [*PARTS, PICTURE])]},
        "'messages[0].content[2]' is a part of type 'image_url'; only parts of type 'text' are read",
    ),
    (openai, {"messages": [turn("user", ["a"])]}, "'messages[0].content[0]' is a string; a part is an object"),
    (openai, {"messages": [turn("user", [{"type": "text"}])]}, "'messages[0].content[0]' has no key 'text'"),
    (trl_completion, {"prompt": [turn("user", [PICTURE])], "completion": "a"}, "'prompt[0].content[0]' is a part"),
    (openai, {"messages": [turn("user", "a", weight=1)]}, "'messages[0]' is to be supervised, but is of 'user'"),
    (openai, {"messages": [turn("assistant", "a", weight=-1)]}, "'messages[0].weight' is -1; 0 or a number from 1e-06"),
    (openai, {"messages": [turn("assistant", "a", weight=1e7)]}, "'messages[0].weight' is 10000000.0; 0 or a number"),
    (openai, {"messages": [turn("assistant", "a", weight=float("nan"))]}, "'messages[0].weight' is nan; 0 or a number"),
    (openai, {"messages": [turn("assistant", "a", loss=0.5)]}, "'messages[0].loss' is 0.5; 0 or 1 is needed"),
    (openai, {"messages": [turn("user", "a", weight=0.5)]}, "'messages[0]' is to be supervised, but is of 'user'"),
    (openai, {"messages": [turn("assistant", "a", weight=0, loss=True)]}, "a 'weight' and a 'loss' that disagree"),
    (openai, {"messages": [turn("user", "a", tool_calls=[OPENAI_CALL])]}, "but 'user' calls no tools"),
    (openai, calls([{"function": {"name": ""}}]), "'messages[0].tool_calls' has a call without a name"),
    (openai, calls([{"name": "add", "arguments": "{"}]), "'arguments of add in messages[0].tool_calls' is not JSON"),
    (openai, calls([{"name": "add", "arguments": [1]}]), "a call of add whose arguments are no JSON object"),
]


@pytest.mark.parametrize(("convert", "row", "message"), REFUSED)
def test_faulty_rows_are_refused(convert: Convert, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        convert(row)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (PADDLENLP_TWO, "paddlenlp"),
        (ALPACA, "alpaca"),
        ({"conversations": SHAREGPT_TWO}, "sharegpt"),
        ({"messages": OPENAI_TWO}, "openai"),
        ({"text": "a"}, "text"),
        ({"text": "a", "title": "b"}, None),
        ({"instruction": "a"}, None),
    ],
)
def test_formats_are_recognised_by_their_keys(row: dict[str, Any], name: str | None) -> None:
    assert next((f.name for f in BUILTIN if f.matches(row)), None) == name


def test_a_faulty_row_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": OPENAI_TWO}, {"messages": []}, {"prompt": "a"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_rows(path, "conversation", "auto", FORMATS)
    assert str(caught.value) == (
        f"{path}:2: 'messages' is not a list of turns\n"
        f"{path}:3: has no key 'messages'; openai needs: messages of role/content, tool_calls, weight; tools"
    )


@pytest.mark.parametrize(
    ("name", "count", "tools"),
    [("alpaca_en_demo", 999, 0), ("alpaca_zh_demo", 1000, 0), ("glaive_toolcall_en_demo", 300, 153)],
)
def test_real_conversations_are_converted(name: str, count: int, tools: int) -> None:
    path = REAL / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set LLMSUITE_TEST_DATA")
    rows: list[Conversation] = read_rows(path, "conversation", "auto", FORMATS)
    assert len(rows) == count
    for row in rows:
        assert row.messages[-1].role == "assistant"
        assert row.supervised == tuple(message.role == "assistant" for message in row.messages)
    assert sum(any(message.tool_calls for message in row.messages) for row in rows) == tools


def test_the_completion_is_supervised() -> None:
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    more = {"prompt": [*turns, {"role": "user", "content": "And?"}], "tools": [ADD]}
    assert trl_completion({"prompt": "Hi?", "completion": "Hello."}) == ONE
    assert trl_completion({"prompt": turns[:1], "completion": turns[1:]}) == ONE
    answer = [{"role": "assistant", "content": "Bye."}]
    assert trl_completion({**more, "completion": answer}) == Conversation(SECOND.messages, SECOND.supervised, TOOLS)
    for completion in ([*answer, *turns], turns[:1]):
        with pytest.raises(ValueError, match="'completion' is not one turn of the assistant"):
            trl_completion({**more, "completion": completion})
    with pytest.raises(ValueError, match="out of order"):
        trl_completion({"prompt": turns, "completion": "Hello."})
