"""Rows of data sets that ms-swift reads by rules of its own; the turns are those of its preprocessors at 3602360a."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.data.rows import Conversation
from llmsuite.plugins.suites.swift_formats import FORMATS

BY_NAME = {data_format.name: data_format for data_format in FORMATS}
EMPTY = "<think>\n\n</think>\n\n"


def turns(name: str, row: dict[str, Any]) -> list[tuple[str, str]]:
    found: Conversation = BY_NAME[name].convert(row)
    return [(message.role, message.content) for message in found.messages]


@pytest.mark.parametrize(
    ("instruction", "extra", "question"),
    [
        ("翻译", "输入\uff1a猫", "翻译\n猫"),
        ("翻译", "输入\uff1a", "翻译"),
        ("翻译", "", "翻译"),
        ("翻译", None, "翻译"),
        ("", "输入\uff1aa", "a"),
        ("q", "a 输入\uff1ab", "q\na 输入\uff1ab"),
        ("q", "输入\uff1a输入\uff1ab", "q\n输入\uff1ab"),
        ("", "", ""),
    ],
)
def test_alpaca_zh(instruction: str, extra: str | None, question: str) -> None:
    row = {"instruction": instruction, "input": extra, "output": " cat "}
    assert turns("swift_alpaca_zh", row) == [("user", question), ("assistant", " cat ")]


@pytest.mark.parametrize("row", [{"instruction": "", "input": None, "output": "x"}, {"output": "x"}])
def test_alpaca_without_a_question_is_faulty(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="neither an instruction nor an input"):
        BY_NAME["swift_alpaca_zh"].convert(row)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("Answer:  yes \n", "yes"),
        ("Answer: ", ""),
        (" Answer: x ", " Answer: x "),
        ("Answer:x ", "Answer:x "),
        ("Answer: Answer: x ", "Answer: x"),
    ],
)
def test_long_alpaca(output: str, answer: str) -> None:
    row = {"file": "a", "instruction": "Q?", "input": "more", "output": output}
    assert turns("swift_long_alpaca", row) == [("user", "Q?\nmore"), ("assistant", answer)]


def test_self_cognition() -> None:
    row = {"query": "who?", "response": "I am robot.", "tag": "en"}
    answer = ("assistant", f"{EMPTY}I am robot.")
    assert turns("swift_self_cognition_qwen3", row) == [("user", "who? /no_think"), answer]
    assert turns("swift_self_cognition_empty_think", row) == [("user", "who?"), answer]


def test_emoji_pairs() -> None:
    convert = BY_NAME["swift_emoji_pairs"].convert
    found = convert({"question": "hi ☺\ufe0f", "answer_zh": "好 😀\ufe0f", "answer_en": "ok ☺\ufe0f"})
    assert [message.content for message in (*found.prompt, found.chosen, found.rejected)] == ["hi ☺", "好 😀", "ok ☺"]
    assert convert({"prompt": "hi", "answer_zh": "a", "answer_en": "b"}).prompt[0].content == "hi"
    with pytest.raises(ValueError, match="two equal answers"):
        convert({"question": "hi", "answer_zh": "a\ufe0f", "answer_en": "a"})
    with pytest.raises(ValueError, match="has the questions"):
        convert({"question": "hi", "prompt": "ho", "answer_zh": "a", "answer_en": "b"})


def test_formats_are_chosen_by_name_only(registry: Registry) -> None:
    row = {"instruction": "a", "input": "", "output": "b", "query": "a", "response": "b", "question": "c"}
    for data_format in FORMATS:
        assert registry.data_formats[data_format.name] == data_format
        assert not data_format.matches(row)
