"""Every shape of rows with a prompt, alone or with one answer: what it becomes, and what is said of a faulty one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.data.prompt_formats import (
    BUILTIN,
    alpaca_prompt,
    alpaca_unpaired,
    openai_prompt,
    openai_unpaired,
    paddlenlp_prompt,
    paddlenlp_unpaired,
    prompt,
    sharegpt_prompt,
    sharegpt_unpaired,
    trl_unpaired,
)
from llmsuite.data.read import read_rows
from llmsuite.data.rows import Message, Prompt, ToolCall, Unpaired
from tests.support.fields import fields

SYSTEM = Message("system", "Be brief.")
ASK = Message("user", "Hi?")
SAY = Message("assistant", "Hello.")
AGAIN = Message("user", "And?")
BYE = Message("assistant", "Bye.")
GOOD = Unpaired((ASK,), BYE, True)
BAD = Unpaired((ASK,), BYE, False)
LONG = Unpaired((SYSTEM, ASK, SAY, AGAIN), BYE, True)
ONE = Prompt((ASK,))
TWO = Prompt((SYSTEM, ASK, SAY, AGAIN))


def with_columns(found: Prompt, **columns: Any) -> Prompt:
    return dataclasses.replace(found, columns=columns)


ADD = {"name": "add", "parameters": {"type": "object"}}
TOOLS = json.dumps([{"type": "function", "function": ADD}])
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}


def turns(*messages: Message) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def said(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


TRL = {"prompt": "Hi?", "completion": "Bye.", "label": True}
PADDLENLP = {"src": ["Hi?"], "tgt": [], "response": ["Bye."], "sort": [1]}
SHAREGPT = {"conversations": said("Hi?", "Bye."), "kto_tag": True}
OPENAI = {"messages": turns(ASK, BYE), "label": True}
ALPACA = {"instruction": "Hi?", "input": "", "output": "Bye.", "kto_tag": True}

Convert = Callable[[Any], Any]
ACCEPTED: list[tuple[Convert, dict[str, Any], Unpaired | Prompt]] = [
    (trl_unpaired, TRL, GOOD),
    (trl_unpaired, {**TRL, "label": False}, BAD),
    (trl_unpaired, {**TRL, "label": 0}, BAD),
    (trl_unpaired, {"prompt": turns(*LONG.prompt), "completion": turns(BYE), "label": True}, LONG),
    (paddlenlp_unpaired, PADDLENLP, GOOD),
    (paddlenlp_unpaired, {"src": "Hi?", "response": "Bye.", "sort": [0]}, BAD),
    (paddlenlp_unpaired, {**PADDLENLP, "src": ["Hi?", "And?"], "tgt": ["Hello."], "system": "Be brief."}, LONG),
    (sharegpt_unpaired, SHAREGPT, GOOD),
    (sharegpt_unpaired, {"conversations": said("Hi?", "Bye."), "label": False}, BAD),
    (sharegpt_unpaired, {"conversations": said("Hi?", "Hello.", "And?", "Bye."), "system": "Be brief.", "label": 1},
     LONG),
    (openai_unpaired, OPENAI, GOOD),
    (openai_unpaired, {"messages": turns(*LONG.prompt, BYE), "kto_tag": True}, LONG),
    (alpaca_unpaired, ALPACA, GOOD),
    (alpaca_unpaired, {"instruction": "Hi?", "output": "Bye.", "label": False}, BAD),
    (alpaca_unpaired, {"instruction": "And?", "output": "Bye.", "label": 1, "system": "Be brief.",
                       "history": [["Hi?", "Hello."]]}, LONG),
    (prompt, {"prompt": "Hi?"}, ONE),
    (prompt, {"prompt": turns(*TWO.messages)}, TWO),
    (prompt, {"prompt": "Hi?", "tools": [ADD]}, Prompt((ASK,), TOOLS)),
    (paddlenlp_prompt, {"src": "Hi?"}, ONE),
    (prompt, {"prompt": "Hi?", "tests": [1], "empty": None}, with_columns(ONE, tests=[1])),
    (paddlenlp_prompt, {"src": ["Hi?"], "tgt": ["Bye."]}, with_columns(ONE, answer="Bye.")),
    (paddlenlp_prompt, {"src": "Hi?", "tgt": "Bye.", "level": 3}, with_columns(ONE, answer="Bye.", level=3)),
    (paddlenlp_prompt, {"src": ["Hi?", "And?"], "tgt": ["Hello."], "system": "Be brief."}, TWO),
    (alpaca_prompt, {"instruction": "Hi?"}, ONE),
    (alpaca_prompt, {"instruction": "And?", "output": "Bye.", "history": [["Hi?", "Hello."]], "system": "Be brief."},
     with_columns(TWO, answer="Bye.")),
    (alpaca_prompt, {"instruction": "Hi?", "input": "You!"}, Prompt((Message("user", "Hi?\nYou!"),))),
    (sharegpt_prompt, {"conversations": said("Hi?")}, ONE),
    (sharegpt_prompt, {"conversations": said("Hi?", "Bye."), "tools": json.dumps([ADD])},
     Prompt((ASK,), TOOLS, {"answer": "Bye."})),
    (openai_prompt, {"messages": turns(*TWO.messages)}, TWO),
    (openai_prompt, {"messages": turns(ASK, BYE)}, with_columns(ONE, answer="Bye.")),
    (openai_prompt, {"messages": turns(ASK, BYE), "answer": "4", "task": "sum"},
     with_columns(ONE, answer="4", task="sum")),
    (
        openai_prompt,
        {"messages": [*turns(ASK), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]},
        Prompt((ASK, Message("assistant", "", (ToolCall("add", "{}"),)), Message("tool", "3"))),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("convert", "row", "expected"), ACCEPTED)
def test_accepted_rows_are_converted(convert: Convert, row: dict[str, Any], expected: Unpaired | Prompt) -> None:
    assert fields(convert(row)) == fields(expected)


REFUSED: list[tuple[Convert, dict[str, Any], str]] = [
    (trl_unpaired, {**TRL, "label": "yes"}, "'label' is 'yes'; true or false is needed"),
    (trl_unpaired, {**TRL, "label": 2}, "'label' is 2; true or false is needed"),
    (trl_unpaired, {**TRL, "label": None}, "'label' is None"),
    (trl_unpaired, {**TRL, "label": float("nan")}, "'label' is nan"),
    (trl_unpaired, {**TRL, "completion": turns(BYE, BYE)}, "'completion' has 2 turns; one is needed"),
    (trl_unpaired, {**TRL, "completion": turns(ASK)}, "the last turn is not an answer of the assistant"),
    (trl_unpaired, {**TRL, "prompt": turns(SAY)}, "the prompt does not end with a turn of the user"),
    (trl_unpaired, {**TRL, "prompt": 3}, "'prompt' is neither text nor a list of turns"),
    (paddlenlp_unpaired, {**PADDLENLP, "response": ["a", "b"]}, "'response' has 2 answers; one is needed"),
    (paddlenlp_unpaired, {**PADDLENLP, "sort": 1}, "'sort' is 1; a list with 1 or 0 is needed"),
    (paddlenlp_unpaired, {**PADDLENLP, "sort": [3]}, "'sort[0]' is 3"),
    (paddlenlp_unpaired, {**PADDLENLP, "tgt": ["a"]}, "'src' has 1 turns and 'tgt' 1; src has one more than tgt"),
    (sharegpt_unpaired, {**SHAREGPT, "label": True}, "has kto_tag and label of kto_tag, label; one of them is needed"),
    (sharegpt_unpaired, {**SHAREGPT, "conversations": said("Hi?")}, "the last turn is not an answer"),
    (
        sharegpt_unpaired,
        {**SHAREGPT, "conversations": said("Hi?", "Bye.")[1:]},
        "'conversations[0]' of the assistant is at the beginning",
    ),
    (sharegpt_unpaired, {**SHAREGPT, "tools": "{"}, "'tools' is not JSON"),
    (openai_unpaired, {"messages": turns(ASK, BYE)}, "has neither of kto_tag, label"),
    (openai_unpaired, {**OPENAI, "messages": []}, "'messages' is not a list of turns"),
    (alpaca_unpaired, {**ALPACA, "output": 3}, "'output' is an integer, not text"),
    (prompt, {"prompt": ""}, "the last turn of the prompt is empty"),
    (prompt, {"prompt": "  \n"}, "the last turn of the prompt is empty"),
    (prompt, {"prompt": turns(ASK, SAY)}, "the prompt does not end with a turn of the user"),
    (paddlenlp_prompt, {"src": []}, "the prompt does not end with a turn of the user"),
    (paddlenlp_prompt, {"src": ["a", "b", "c"], "tgt": ["a"]}, "src has as many as tgt, or one more"),
    (openai_prompt, {"messages": turns(SYSTEM)}, "the prompt does not end with a turn of the user"),
    (
        sharegpt_prompt,
        {"conversations": said("Hi?", "Hello.")[1:], "system": "a"},
        "'conversations[0]' of the assistant is",
    ),
]


@pytest.mark.parametrize(("convert", "row", "message"), REFUSED)
def test_faulty_rows_are_refused(convert: Convert, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        convert(row)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["unpaired", "prompt"])
def test_each_accepted_row_is_read_and_recognised(kind: str, tmp_path: Path, registry: Registry) -> None:
    rows = [
        (row, expected, convert.__name__)
        for convert, row, expected in ACCEPTED
        if isinstance(expected, Unpaired) == (kind == "unpaired")
    ]
    assert len(rows) > 10
    for row, expected, name in rows:
        path = tmp_path / "one.jsonl"
        path.write_text(json.dumps(row))
        assert list(map(fields, read_rows(path, kind, "auto", registry.data_formats))) == [fields(expected)]
        fitting = next(f for f in BUILTIN if f.kind == kind and f.matches(row))
        assert fitting.name == name
