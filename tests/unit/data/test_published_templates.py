"""Published chat templates render what transformers renders, and supervise what it would mask."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.conversation_formats import openai
from llmsuite.data.rows import Conversation
from llmsuite.data.thoughts import thoughts_of, visible_content
from tests.support.chat_rows import rows
from tests.support.paths import ROOT

REFERENCE = ROOT / "tests" / "reference"
TEXTS: dict[str, list[Any]] = json.loads((REFERENCE / "chat_texts.json").read_text(encoding="utf-8"))
SUPERVISED = {"qwen3": 46, "qwen3_training": 46, "glm4moe": 44, "gptoss": 34, "qwen2_5": 22, "llama3_1": 22}
"""Rows that can be trained on; the others are refused by name, such as thoughts where a template has none."""
REFUSALS = re.compile(
    "leaves out (the thoughts|the tool|a part of the content)|has no variable|does not mark the end|"
    "renders (messages|what is before)"
)


def published(name: str) -> ChatTemplate:
    source = (REFERENCE / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, name)


def pairs_or_error(template: ChatTemplate, conversation: Conversation) -> list[tuple[str, str]] | str:
    try:
        return template.supervised_turns(conversation)
    except UserError as error:
        return str(error)


def test_there_are_fifty_rows_of_each_template() -> None:
    assert len(rows()) == 50
    assert {len(texts) for texts in TEXTS.values()} == {50}
    assert {path.stem for path in Path(REFERENCE / "chat_templates").glob("*.jinja")} == TEXTS.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_those_of_transformers(name: str) -> None:
    template = published(name)
    for row, expected in zip(rows(), TEXTS[name]):
        conversation = openai(row)
        kwargs = conversation.template_kwargs
        if expected is None:
            with pytest.raises(UserError, match="has no variable"):
                template.render(conversation.messages, tools=conversation.tools, kwargs=kwargs)
            continue
        text = template.render(conversation.messages, tools=conversation.tools, kwargs=kwargs)
        assert hashlib.sha256(text.encode()).hexdigest() == expected["sha256"], (row, text)


@pytest.mark.parametrize("name", TEXTS)
def test_supervised_turns_are_those_of_transformers(name: str) -> None:
    template = published(name)
    count = 0
    for row, expected in zip(rows(), TEXTS[name]):
        conversation = openai(row)
        kwargs = conversation.template_kwargs
        tools = conversation.tools
        pairs = pairs_or_error(template, conversation)
        if isinstance(pairs, str):
            assert REFUSALS.search(pairs), pairs
            continue
        count += 1
        full = template.render(conversation.messages, tools=tools, kwargs=kwargs)
        indices = [i for i, is_supervised in enumerate(conversation.supervised) if is_supervised]
        assert len(pairs) == len(indices)
        for i, (before, after) in zip(indices, pairs):
            assert full.startswith(after)
            assert after.startswith(before)
            message = conversation.messages[i]
            turn = after[len(before) :]
            assert visible_content(message) in turn
            assert all(call.name in turn for call in message.tool_calls)
            others = [m for k, m in enumerate(conversation.messages) if k != i and m.content]
            assert not any(visible_content(other) in turn for other in others if other.role != "assistant")
        assert thoughts_of(conversation.messages[-1]) in pairs[-1][1]
        for i, span, (before, after) in zip(indices, expected.get("spans", ()), pairs):
            begin, end = span
            assert len(after) == end
            # a variant of trl may also mask what generation is prompted with
            prompt = template.render(conversation.messages[:i], add_generation_prompt=True, tools=tools, kwargs=kwargs)
            opened = prompt.removesuffix("<think>\n")
            assert prompt.endswith(full[begin : len(before)]) or opened.endswith(full[begin : len(before)])
    assert count == SUPERVISED.get(name, 10)


def test_an_earlier_turn_is_supervised_without_the_thoughts_that_the_template_drops() -> None:
    asked = [{"role": "user", "content": "2+2?"}, {"role": "user", "content": "3+3?"}]
    answers = [{"role": "assistant", "content": "4"}, {"role": "assistant", "content": "6"}]
    thinking = [{**answers[0], "reasoning_content": "hm"}, {**answers[1], "reasoning_content": "well"}]
    qwen = published("qwen3")
    row: dict[str, Any] = {"messages": [asked[0], thinking[0], asked[1], thinking[1]]}
    first, last = qwen.supervised_turns(openai(row))
    assert first[1][len(first[0]) :] == "4<|im_end|>\n"
    assert last[1][len(last[0]) :] == "<think>\nwell\n</think>\n\n6<|im_end|>\n"
    row = {
        "messages": [asked[0], answers[0], asked[1], answers[1]],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    first, last = qwen.supervised_turns(openai(row))
    assert first[1][len(first[0]) :] == "4<|im_end|>\n"
    assert last[0].endswith("<think>\n\n</think>\n\n"), "it is in the prompt, and not supervised twice"
    assert last[1][len(last[0]) :] == "6<|im_end|>\n"
