"""Pairs of ms-swift: their turns are those of its `AutoPreprocessor` and `TemplateInputs.from_dict` at 3602360a."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.contract.registry import Registry
from llmsuite.data.faults import Faults
from llmsuite.data.keys import ColumnRules
from llmsuite.data.preference_formats import trl_preference
from llmsuite.data.rejected_formats import BUILTIN, messages_preference, query_response_preference
from llmsuite.data.row_converter import RowConverter
from llmsuite.data.rows import Message

Turns = list[tuple[str, str]]
TOOLS = '[{"type": "function", "function": {"name": "weather"}}]'
HI = [("user", "Hi?")]
LONG = [("system", "Be brief."), ("user", "Hi?"), ("assistant", "Hello."), ("user", "And?")]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [turn(role, content) for role, content in pairs]


GOOD = ("assistant", "Good.")
BAD = ("assistant", "Bad.")
ROW: dict[str, Any] = {"messages": turns(*HI, GOOD), "rejected_response": "Bad."}
QUERY: dict[str, Any] = {"query": "Hi?", "response": "Good.", "rejected_response": "Bad."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (ROW, HI),
        ({**ROW, "messages": turns(*LONG, GOOD)}, LONG),
        ({**ROW, "system": "Be brief."}, [("system", "Be brief."), *HI]),
        ({**ROW, "rejected_response": turns(BAD)}, HI),
        ({"messages": turns(*LONG, GOOD), "rejected_messages": turns(*LONG, BAD)}, LONG),
        ({**ROW, "rejected_response": None, "rejected_messages": turns(*HI, BAD)}, HI),
        (QUERY, HI),
        ({**QUERY, "query": "And?", "history": [["Hi?", "Hello."]], "system": "Be brief."}, LONG),
    ],
)
def test_rows_have_the_turns_of_ms_swift(row: dict[str, Any], prompt: Turns, registry: Registry) -> None:
    found = RowConverter("preference", "auto", registry.data_formats).convert("a.jsonl:1", row, None, Faults())
    assert [(message.role, message.content) for message in found.prompt] == prompt
    assert found.chosen == Message(*GOOD)
    assert found.rejected == Message(*BAD)


@pytest.mark.parametrize("more", [{}, {"rejected_tools": TOOLS}])
def test_both_answers_have_the_tools(more: dict[str, str]) -> None:
    found = messages_preference({**ROW, "tools": TOOLS, **more})
    assert found.tools == TOOLS
    messages = {"messages": ROW["messages"], "rejected_messages": turns(*HI, BAD), "tools": TOOLS}
    if more:
        assert messages_preference({**messages, **more}).tools == TOOLS
        return
    with pytest.raises(ValueError, match="'tools' and 'rejected_tools' differ"):
        messages_preference(messages)  # ms-swift renders the rejected answer without tools


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "rejected_response": None}, "has neither of rejected_response, rejected_messages; one of them is"),
        ({**ROW, "rejected_messages": turns(*HI, BAD)}, "has rejected_response and rejected_messages of"),
        ({**ROW, "rejected_response": turns(BAD, BAD)}, "'rejected_response' has 2 turns; one is needed"),
        ({**ROW, "rejected_response": turns(*HI)}, "the rejected answer is a turn of 'user', not of the assistant"),
        ({**ROW, "rejected_response": 3}, "'rejected_response' is neither text nor a list of turns"),
        ({**ROW, "rejected_tools": TOOLS}, "'tools' and 'rejected_tools' differ"),
        ({**ROW, "messages": turns(*HI)}, "'messages' has 0 turns after the last one of the user"),
        ({**ROW, "messages": turns(GOOD)}, "out of order"),
        ({**ROW, "messages": [*turns(*HI), CALL, turn("tool", "sun"), turn(*GOOD)]}, "'messages' has 3 turns after"),
        ({"messages": ROW["messages"], "rejected_messages": turns(("user", "Ho?"), BAD)}, "more than their last turn"),
        ({"messages": ROW["messages"], "rejected_messages": []}, "'rejected_messages' is not a list of turns"),
        (
            # ms-swift renders the rejected answer without the column
            {"messages": ROW["messages"], "rejected_messages": turns(*HI, BAD), "system": "Be brief."},
            "'messages' and 'rejected_messages' differ in more than their last turn",
        ),
    ],
)
def test_other_rows_are_faulty(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        messages_preference(row)


def test_a_query_has_one_rejected_answer() -> None:
    with pytest.raises(ValueError, match="has neither of"):
        query_response_preference({**QUERY, "rejected_response": None})


@pytest.mark.parametrize("key", ["rejected_images", "rejected_objects", "channel", "label"])
def test_other_columns_of_ms_swift_are_refused_by_name(key: str, registry: Registry) -> None:
    faults = Faults("skip")
    converter = RowConverter("preference", "auto", registry.data_formats)
    assert converter.convert("a.jsonl:1", {**ROW, key: ["a"]}, None, faults) is None
    assert key in next(iter(faults.counts))
    rules = ColumnRules(ignored=[key])
    assert RowConverter("preference", "auto", registry.data_formats, rules).convert(
        "a.jsonl:1", {**ROW, key: ["a"]}, None, Faults()
    )


@given(history=st.lists(st.tuples(st.text(), st.text()), max_size=3), texts=st.tuples(st.text(), st.text(), st.text()))
def test_all_forms_of_a_pair_are_the_same(history: list[tuple[str, str]], texts: tuple[str, str, str]) -> None:
    question, good, bad = texts
    earlier = [pair for ask, say in history for pair in (("user", ask), ("assistant", say))]
    prompt = turns(*earlier, ("user", question))
    chosen, rejected = turn("assistant", good), turn("assistant", bad)
    expected = trl_preference({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    messages = [*prompt, chosen]
    assert messages_preference({"messages": messages, "rejected_response": bad}) == expected
    assert messages_preference({"messages": messages, "rejected_response": [rejected]}) == expected
    assert messages_preference({"messages": messages, "rejected_messages": [*prompt, rejected]}) == expected
    row = {"query": question, "response": good, "history": [list(pair) for pair in history], "rejected_response": bad}
    assert query_response_preference(row) == expected


def test_the_formats_are_registered(registry: Registry) -> None:
    for data_format in BUILTIN:
        assert registry.data_formats[data_format.name] == data_format
