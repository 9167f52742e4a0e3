"""Published chat templates render what transformers renders, and supervise what it would mask."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.conversation_formats import openai
from llmsuite.data.rows import Conversation
from llmsuite.data.thoughts import thoughts_of, visible_content
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.drop_counts import DropCounts
from tests.support.chat_rows import CALL, TOOLS, rows, write_tokenizer
from tests.support.paths import ROOT
from tests.support.sft_case import make_stage, samples

REFERENCE = ROOT / "tests" / "reference"
TEXTS: dict[str, list[Any]] = json.loads((REFERENCE / "chat_texts.json").read_text(encoding="utf-8"))
SUPERVISED = {
    "qwen3": 46,
    "qwen3_training": 46,
    "glm4moe": 46,
    "gptoss": 34,
    "qwen2_5": 22,
    "llama3_1": 22,
    "glm4_0414": 18,
    "mistral_v7": 12,
    "mistral_v3": 8,
}
"""Rows that can be trained on; the others are refused by name, such as thoughts where a template has none."""
REFUSALS = re.compile(
    "refuses the turns|leaves out (the thoughts|the tool|a part of the content)|has no variable|does not mark the end|"
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
        if "refused" in expected:
            with pytest.raises(UserError, match=re.escape(expected["refused"])):
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


@pytest.mark.parametrize("name", TEXTS)
def test_tokens_and_supervision_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_tokenizer(tmp_path))
    template = published(name)
    stage = make_stage(8192, template.source, tokenizer=tokenizer)
    count = 0
    for row, expected in zip(rows(), TEXTS[name]):
        if expected is None or "refused" in expected:
            continue
        conversation = openai(row)
        kwargs = conversation.template_kwargs
        text = template.render(conversation.messages, tools=conversation.tools, kwargs=kwargs)
        full = tokenizer.encode(text)
        assert hashlib.sha256(json.dumps(full).encode()).hexdigest() == expected["ids"], row
        if isinstance(pairs_or_error(template, conversation), str):
            with pytest.raises(UserError, match=REFUSALS.pattern):
                samples(stage, conversation)
            continue
        ((sample,), _) = samples(stage, conversation)
        count += 1
        ids = sample.ids.tolist()
        if ids[: len(full)] == full:
            ids = full  # the end-of-sequence token is added where the template ends turns with another one
        assert ids == full[: len(ids)]
        assert not tokenizer.decode(full[len(ids) :]).strip()
        edges = np.flatnonzero(np.diff(sample.weights > 0, prepend=False, append=False)).tolist()
        indices = [i for i, is_supervised in enumerate(conversation.supervised) if is_supervised]
        spans = zip(edges[::2], edges[1::2])
        for i, (begin, end), (masked_begin, masked_end) in zip(indices, spans, expected.get("mask", ())):
            assert masked_begin <= begin < min(end, len(full)) <= masked_end
            # a variant of trl may also mask what generation is prompted with, and the line end after a turn
            prompt = template.render(conversation.messages[:i], True, conversation.tools, kwargs)
            of_prompt = tokenizer.decode(full[masked_begin:begin], False)
            assert prompt.endswith(of_prompt) or prompt.removesuffix("<think>\n").endswith(of_prompt)
            assert not tokenizer.decode(full[min(end, len(full)) : masked_end], False).strip()
        if "mask" in expected:
            assert len(edges) == 2 * len(expected["mask"])
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


ROUNDS: dict[str, Any] = {
    "messages": [
        *(
            {"role": "user", "content": f"Rome {n}?"} if k == 0 else turn
            for n in range(2)
            for k, turn in enumerate(
                (
                    {},
                    {"role": "assistant", "content": "", "reasoning_content": f"I look {n}.", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "abc123XYZ", "name": "weather", "content": '{"sky": "clear"}'},
                    {"role": "assistant", "content": f"Clear {n}.", "reasoning_content": f"It says so {n}."},
                )
            )
        ),
    ],
    "tools": TOOLS,
}
"""Two questions, each with thoughts, a call, more thoughts and an answer."""


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_thoughts_between_calls_may_be_dropped_by_the_next_question(name: str) -> None:
    template = published(name)
    conversation = openai(ROUNDS)
    full = template.render(conversation.messages, tools=conversation.tools)
    pairs = template.supervised_turns(conversation)
    turns = [after[len(before) :] for before, after in pairs]
    assert len(turns) == 4
    counts = DropCounts(Path("rows.jsonl"), read=1)
    assert make_stage(8192, template.source).make_samples([conversation], counts)
    assert counts.forgetful == 1, "it is counted"
    assert all(full.startswith(after) for _, after in pairs)
    dropped = template.dropped_thoughts(conversation)
    assert dropped == [1, 3], "those of the first question"
    assert "weather" in turns[0]
    assert "I look 0" not in turns[0]
    assert "Clear 0." in turns[1]
    assert "It says so 0" not in turns[1]
    assert "I look 1" in turns[2]
    assert "It says so 1" in turns[3]
    assert "Clear 1." in turns[3]
    ends = [len(after) for _, after in pairs]
    assert ends == sorted(ends)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["qwen3", "glm4moe"]),
    rounds=st.lists(st.tuples(st.lists(st.booleans(), max_size=2), st.booleans()), min_size=1, max_size=3),
)
def test_turns_of_any_rounds_are_those_of_the_full_conversation(
    name: str, rounds: list[tuple[list[bool], bool]]
) -> None:
    """`rounds`: for each question, whether each call has thoughts before it, and whether the answer has."""
    messages: list[dict[str, Any]] = []
    for number, (calls, answer_thinks) in enumerate(rounds):
        messages.append({"role": "user", "content": f"Question {number}?"})
        for k, thinks in enumerate(calls):
            turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
            if thinks:
                turn["reasoning_content"] = f"Call {number}.{k}."
            result = {"role": "tool", "tool_call_id": CALL["id"], "content": f"Result {number}.{k}."}
            messages += [turn, result]
        answer = {"role": "assistant", "content": f"Answer {number}."}
        if answer_thinks:
            answer["reasoning_content"] = f"Thought {number}."
        messages.append(answer)
    template = published(name)
    conversation = openai({"messages": messages, "tools": TOOLS})
    full = template.render(conversation.messages, tools=conversation.tools)
    pairs = template.supervised_turns(conversation)
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    dropped = template.dropped_thoughts(conversation)
    end = 0
    for i, (before, after) in zip(indices, pairs, strict=True):
        assert full.startswith(after)
        assert end <= len(before) < len(after)
        turn_text = after[len(before) :]
        assert messages[i]["content"] in turn_text
        assert ("weather" in turn_text) == ("tool_calls" in messages[i])
        thoughts = messages[i].get("reasoning_content", "")
        assert not thoughts or (thoughts in turn_text) == (i not in dropped)
        end = len(after)
    last_question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    assert all(i < last_question for i in dropped)
