"""Turns, calls and tools of rows: nothing that a row says is lost on the way to its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data import conversation_formats, preference_formats, prompt_formats, rejected_formats
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Conversation, Message, conversations_of, turns_of
from llmsuite.data.turns import parse_message, parse_sharegpt_message
from llmsuite.inference.prompts import read_messages
from tests.support.tool_turns import ASK, CALL, HELLO, ROWS, TOOLS

FORMATS = {
    data_format.name: data_format
    for data_format in (
        *conversation_formats.BUILTIN,
        *preference_formats.BUILTIN,
        *rejected_formats.BUILTIN,
        *prompt_formats.BUILTIN,
    )
}
JSON = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["reasoning_content", "name", "tool_call_id", "channel", "prefix", "tool_plan", "x"])
TEXT_KEYS = ("reasoning_content", "name", "tool_call_id")


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, "a test")


AS_JSON = template("{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}")


def rendered(conversation: Conversation) -> tuple[list[Any], Any]:
    """The turns and the tools that a template is given."""
    *turns, tools = AS_JSON.render(conversation.messages, tools=conversation.tools).split("\n")
    return [json.loads(turn) for turn in turns], json.loads(tools)


def test_every_format_has_an_example() -> None:
    assert ROWS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"text"}))  # text has no turns
def test_every_format_keeps_tools_and_system(name: str) -> None:
    row = {**ROWS[name], "tools": TOOLS, "system": "Be brief."}
    assert FORMATS[name].matches(row)
    found = conversations_of(FORMATS[name].convert(row))
    assert found
    for conversation in found:
        turns, tools = rendered(conversation)
        assert turns[0] == {"role": "system", "content": "Be brief."}
        assert turns[1] == ASK
        assert tools == TOOLS
        assert len(conversation.supervised) == len(conversation.messages)
    assert {"Be brief.", "Hi?", "weather"} <= {text for _, text in turns_of(FORMATS[name].convert(row))}
    as_text = {**ROWS[name], "tools": json.dumps([TOOLS[0]["function"]]), "system": None}
    assert all(rendered(each)[1] == TOOLS for each in conversations_of(FORMATS[name].convert(as_text)))
    assert all(rendered(each)[0][0] == ASK for each in conversations_of(FORMATS[name].convert(as_text)))


@pytest.mark.parametrize("name", ["openai", "trl_preference", "openai_unpaired", "openai_prompt"])
def test_two_different_systems_are_refused(name: str) -> None:
    key = "prompt" if name == "trl_preference" else "messages"
    turns = [{"role": "system", "content": "Be long."}, ASK]
    answer = [] if name in ("trl_preference", "openai_prompt") else [HELLO]
    row = {**ROWS[name], key: [*turns, *answer], "system": "Be brief."}
    with pytest.raises(ValueError, match="a column 'system', and the turns begin with another"):
        FORMATS[name].convert(row)
    (first, *_) = conversations_of(FORMATS[name].convert({**row, "system": "Be long."}))
    assert [message.role for message in first.messages[:2]] == ["system", "user"]


def of_turn(turn: Mapping[str, Any]) -> dict[str, Conversation]:
    """An answer in all places where a row may have one, by the place."""
    asked = [ASK]
    rows = {
        "openai": {"messages": [*asked, turn]},
        "trl_completion": {"prompt": asked, "completion": [turn]},
        "trl_preference": {"prompt": asked, "chosen": [turn], "rejected": "No."},
        "openai_unpaired": {"messages": [*asked, turn], "label": True},
        "trl_unpaired": {"prompt": asked, "completion": [turn], "label": 0},
        "openai_prompt": {"messages": [*asked, turn, {"role": "user", "content": "And?"}]},
        "prompt": {"prompt": [*asked, turn, {"role": "user", "content": "And?"}]},
    }
    found = {name: conversations_of(FORMATS[name].convert(row))[0] for name, row in rows.items()}
    return found | {"a request": Conversation(tuple(read_messages([*asked, turn])), (False, True))}


@given(more=st.dictionaries(KEYS, JSON, max_size=4), text=st.text(max_size=5))
def test_a_turn_reaches_its_template_with_all_its_keys(more: dict[str, Any], text: str) -> None:
    more = {key: str(value) if key in TEXT_KEYS else value for key, value in more.items()}
    turn = {"role": "assistant", "content": text, **more}
    for place, conversation in of_turn({**turn, "refusal": None}).items():
        turns, _ = rendered(conversation)
        assert turns[1] == turn, place


@given(arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=3), silent=st.booleans(), as_text=st.booleans())
def test_a_call_reaches_its_template_with_its_id_and_arguments(
    arguments: dict[str, Any], silent: bool, as_text: bool
) -> None:
    given_arguments: Any = json.dumps(arguments) if as_text else arguments
    call = {"id": "abc123XYZ", "type": "function", "function": {"name": "weather", "arguments": given_arguments}}
    turn = {"role": "assistant", "content": None if silent else "I look.", "tool_calls": [call]}
    for place, conversation in of_turn(turn).items():
        assert json.loads(conversation.messages[1].tool_calls[0].arguments) == arguments
        assert conversation.messages[1].as_turn() == turn, place
        (found,) = rendered(conversation)[0][1]["tool_calls"]
        assert found["id"] == "abc123XYZ"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_shown_or_refused_by_name(key: str) -> None:
    turn = {"role": "assistant", "content": "4", key: "two and two"}
    for place, conversation in of_turn(turn).items():
        if place == "a request":
            continue
        shows = template(f"{{% for m in messages %}}{{{{ m.{key} }}}} {{{{ m.content }}}};{{% endfor %}}")
        assert "two and two 4" in shows.render(conversation.messages)
        plain = template("{% for m in messages %}{{ m.content }};{% endfor %}{{ 'x' if add_generation_prompt }}")
        with pytest.raises(UserError, match=f"leaves out the thoughts of messages\\[1\\] \\('{key}'"):
            plain.prompt(conversation.messages[:2])
    with pytest.raises(ValueError, match="different thoughts"):
        parse_message({**turn, "reasoning_content": "a", "thinking": "b"}, "messages[1]")


def test_a_key_of_thoughts_is_matched_as_a_full_word() -> None:
    shown = "{% for m in messages %}{{ m.reasoning_content if enable_thinking }}{{ m.content }};{% endfor %}"
    turns = [parse_message(turn, "turn") for turn in (ASK, {**HELLO, "thinking": "hm"}, ASK)]
    with pytest.raises(UserError, match=r"leaves out the thoughts of messages\[1\] \('thinking'\)"):
        template("{% for m in messages %}{{ m.content if enable_thinking or True }};{% endfor %}").prompt(turns)
    thinks = "{% set enable_thinking = true %}" + shown
    assert template(thinks).prompt(turns) == "Hi?;hmHello.;Hi?;", "under the key that the template reads"
    kept = [parse_message(turn, "turn") for turn in (ASK, {**HELLO, "thinking": "", "reasoning_content": "hm"}, ASK)]
    assert kept[1].reasoning == "hm"
    assert template(shown).prompt(kept) == "Hi?;Hello.;Hi?;"  # which turns show them is the template's choice


def test_sharegpt_has_the_same_keys() -> None:
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    found = parse_sharegpt_message({"from": "function_call", "value": json.dumps(call), "reasoning_content": "hm"}, "x")
    assert found.as_turn() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
        "reasoning_content": "hm",
    }
    answer = parse_sharegpt_message({"from": "observation", "value": "sunny", "tool_call_id": "a"}, "x")
    assert answer.as_turn() == {"role": "tool", "content": "sunny", "tool_call_id": "a"}
    with pytest.raises(ValueError, match="both 'from' and 'content'"):
        parse_sharegpt_message({"from": "gpt", "value": "a", "content": "b"}, "x")


def test_the_old_form_of_calls_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'x\.function_call' is OpenAI's old form"):
        parse_message({"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": "{}"}}, "x")
    assert parse_message({"role": "assistant", "content": "a", "function_call": None}, "x") == Message("assistant", "a")


@pytest.mark.parametrize(("comment", "role"), [("{# developer #}", "developer"), ("", "system")])
def test_a_developer_is_the_system_where_a_template_knows_none(comment: str, role: str) -> None:
    found = template(comment + "{{ messages[0].role }}")
    turns = [{"role": "developer", "content": "Be brief."}, ASK, HELLO]
    assert found.render(read_messages(turns)) == role
    assert found.render(FORMATS["openai"].convert({"messages": turns}).messages) == role


def test_answers_left_out_of_prompts_are_kept_in_full() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    found = FORMATS["openai_prompt"].convert({"messages": [ASK, turn], "tools": TOOLS, "task": "sky"})
    assert found.columns == {"answer": "", "answer_turn": turn, "task": "sky"}
