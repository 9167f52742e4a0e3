"""No key of a row or a turn is dropped unread: it is read, ignored by name, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.columns import fill_problems
from llmsuite.data import conversation_formats, preference_formats, prompt_formats, rejected_formats
from llmsuite.data.chat_template import BUILTIN, ChatTemplate
from llmsuite.data.faults import Faults
from llmsuite.data.keys import ALL, MEDIA, ROW_KEYS, TURN_KEYS, ColumnRules, filled, is_nothing
from llmsuite.data.row_converter import RowConverter
from llmsuite.data.rows import REASONING, Prompt, conversations_of
from llmsuite.data.turns import parse_message
from tests.support.tool_turns import ASK, HELLO, ROWS, TOOLS

FORMATS = {
    data_format.name: data_format
    for data_format in (
        *conversation_formats.BUILTIN,
        *preference_formats.BUILTIN,
        *rejected_formats.BUILTIN,
        *prompt_formats.BUILTIN,
    )
}
TABLE = [name for name, data_format in FORMATS.items() if data_format.kind != "prompt"]
WITH_TURNS = [name for name in TABLE if name != "text"]
"""Formats that have the columns of `ROW_KEYS`."""
NAMES = st.text(min_size=1, max_size=6) | st.sampled_from(
    [
        "id",
        "source",
        "chosen",
        "rejected",
        "label",
        "kto_tag",
        "history",
        "sort",
        "answer",
        "input",
        "weight",
        "text",
        "margin",
        "from",
        "value",
        "role",
        "content",
        "type",
    ]
)
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4) | st.just([]) | st.just({}) | st.just([1])
PLAIN = ChatTemplate("{% for m in messages %}{{ m.role }} {{ m.content }};{% endfor %}", {}, "a test")


ABLE = frozenset({"plain_text", "ranked"})


class Recorded(Mapping[str, Any]):
    """A row that records which of its columns are read."""

    def __init__(self, row: Mapping[str, Any]):
        self._row = row
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._row[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def convert(
    name: str, row: Any, ignored: list[str] | None = None, capabilities: frozenset[str] = ABLE
) -> tuple[Any, Faults]:
    data_format = FORMATS[name]
    converter = RowConverter(
        data_format.kind, name, FORMATS, ColumnRules(ignored=ignored or (), capabilities=capabilities)
    )
    faults = Faults()
    return converter.convert("rows.jsonl:7", row, None, faults), faults


def refusal(faults: Faults) -> str:
    with pytest.raises(UserError) as caught:
        faults.check()
    return str(caught.value)


@pytest.mark.parametrize("name", WITH_TURNS)
def test_a_format_declares_exactly_the_columns_that_it_reads(name: str) -> None:
    columns = FORMATS[name].columns
    assert columns is not None
    row = Recorded({**ROWS[name], "tools": TOOLS, "system": "Be brief.", "chat_template_kwargs": {"a": 1}})
    FORMATS[name].convert(row)
    assert row.read <= columns | ROW_KEYS
    assert row.read >= ROW_KEYS
    assert set(ROWS[name]) <= columns


@pytest.mark.parametrize("name", TABLE)
@given(key=NAMES, value=VALUES)
def test_a_column_is_read_or_refused_by_name(name: str, key: str, value: Any) -> None:
    columns = FORMATS[name].columns
    assert columns is not None
    if key in columns | ROW_KEYS or key in MEDIA:  # media have a message of their own
        return
    plain, _ = convert(name, ROWS[name])
    row, faults = convert(name, {**ROWS[name], key: value})
    if is_nothing(value):
        assert row == plain
        return
    assert row is None
    message = refusal(faults)
    assert message.startswith("rows.jsonl:7: has the columns ")
    assert repr(key) in message
    assert "--data.ignore_columns=" in message
    assert "remove them from the rows" in message
    for ignored in ([key], [ALL], ["other", key]):
        assert convert(name, {**ROWS[name], key: value}, ignored)[0] == plain


def test_skipped_rows_are_counted_by_the_columns_that_nothing_reads() -> None:
    faults = Faults("skip")
    for key in ("id", "source", "id"):
        RowConverter("conversation", "openai", FORMATS).convert("x:1", {**ROWS["openai"], key: "a"}, None, faults)
    assert "'id', which openai does not read (2, first at x:1)" in faults.summary()
    assert "'source', which openai does not read (1, first at x:1)" in faults.summary()


@pytest.mark.parametrize("name", ["prompt", "openai_prompt"])
def test_columns_of_prompts_are_for_rewards(name: str) -> None:
    row, _ = convert(name, {**ROWS[name], "gold": "4"})
    assert isinstance(row, Prompt)
    assert row.columns["gold"] == "4"
    row, _ = convert(name, {**ROWS[name], "gold": "4"}, ["gold"])
    assert "gold" not in row.columns


def test_columns_of_a_mapping_are_exactly_those_of_the_format() -> None:
    rules = ColumnRules({"instruction": "ask", "output": "reply", "extra": "id"})
    faults = Faults()
    row = {"ask": "a", "reply": "b", "id": 1, "more": 2}
    assert RowConverter("conversation", "auto", FORMATS, rules).convert("x:1", row, None, faults) is None
    assert refusal(faults) == "x:1: alpaca does not read 'extra'; leave that out of data.columns"
    rules = ColumnRules({"instruction": "ask", "output": "reply"})
    assert RowConverter("conversation", "auto", FORMATS, rules).convert("x:1", row, None, Faults()) is not None


@pytest.mark.parametrize("key", ["images", "image", "video", "audios", "rejected_images"])
def test_media_are_refused_by_name_unless_they_are_named(key: str) -> None:
    turn = {**ASK, key: ["a.png"]}
    with pytest.raises(ValueError, match=rf"'messages\[0\]\.{key}' is there, and only text is read"):
        parse_message(turn, "messages[0]")
    row = {"messages": [turn, HELLO]}
    assert convert("openai", row, [ALL])[0] is None
    assert convert("openai", row, [key])[0] == convert("openai", {"messages": [ASK, HELLO]})[0]
    assert f"has {key}, and only text is read" in refusal(convert("openai", {**ROWS["openai"], key: ["a"]}, [ALL])[1])
    assert parse_message({**ASK, key: []}, "messages[0]").content == "Hi?"


def test_keys_of_parts_are_refused_by_name() -> None:
    part = {"type": "text", "text": "a", "annotations": [], "cache_control": {"type": "ephemeral"}}
    assert parse_message({"role": "user", "content": [part]}, "m").content == "a"
    with pytest.raises(ValueError, match=r"'m\.content\[0\]\.language' is there, and only the text of a part is read"):
        parse_message({"role": "user", "content": [{**part, "language": "de"}]}, "m")
    row = {"messages": [{"role": "user", "content": [{**part, "language": "de"}]}, HELLO]}
    assert convert("openai", row, ["language"])[0].messages[0].content == "a"


@given(key=NAMES | st.sampled_from(["reasoning_effort", "channel", "timestamp"]), value=VALUES)
def test_a_key_of_a_turn_is_read_or_refused_by_name(key: str, value: Any) -> None:
    if key in TURN_KEYS or key in ("tool_calls", "function_call", "images", "from", "value"):
        return
    turn = {**HELLO, key: value}
    row, faults = convert("openai", {"messages": [ASK, turn]})
    assert row is not None, faults.counts
    named = ChatTemplate(
        "{% for m in messages %}{{ m[" + json.dumps(key) + "] }}{{ m.content }};{% endfor %}", {}, "a test"
    )
    as_json = ChatTemplate("{% for m in messages %}{{ m | tojson }}{{ m.content }};{% endfor %}", {}, "a test")
    for template in (PLAIN, as_json, ChatTemplate(BUILTIN["chatml"], {}, "chatml")):
        assert template.unread_key(row.messages[:1]) is None
    assert as_json.unread_key(row.messages) is None
    if key.isidentifier():
        assert named.unread_key(row.messages) is None
    if is_nothing(value):
        assert PLAIN.unread_key(row.messages) is None
        return
    assert PLAIN.unread_key(row.messages) == f"{key!r} of messages[1]"
    with pytest.raises(UserError, match="which is no key that is known: remove it from the rows, or list it in data"):
        PLAIN.prompt([*row.messages, row.messages[0]])
    for ignored in ([key], [key, ALL]):
        (conversation,) = conversations_of(convert("openai", {"messages": [ASK, turn]}, ignored)[0])
        assert PLAIN.unread_key(conversation.messages) is None
    assert ChatTemplate(PLAIN.source, {}, "a test", ignores_unknown=True).unread_key(row.messages) is None


@given(
    key=st.sampled_from(["extra", "strict", "call_id", "response", "parameters"]), value=VALUES, is_inner=st.booleans()
)
def test_a_key_of_a_call_is_read_or_refused_by_name(key: str, value: Any, is_inner: bool) -> None:
    function: dict[str, Any] = {"name": "now", "arguments": {}}
    call: dict[str, Any] = {"type": "function", "function": {**function, key: value}}
    if not is_inner:
        call = {"type": "function", "function": function, key: value}
    row = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %};"
    plain = ChatTemplate(template + "{% endfor %}", {}, "a test")
    as_json = ChatTemplate("{% for m in messages %}{{ m | tojson }};{% endfor %}", {}, "a test")
    messages = convert("openai", row)[0].messages
    assert as_json.unread_key(messages) is None
    place = "messages[1].tool_calls[0]" + (".function" if is_inner else "")
    assert plain.unread_key(messages) == (None if is_nothing(value) else f"{key!r} of {place}")
    for ignored in ([key], [key, ALL]):
        (conversation,) = conversations_of(convert("openai", row, ignored)[0])
        assert plain.unread_key(conversation.messages) is None
        (found,) = conversation.messages[1].as_turn()["tool_calls"]
        assert found == {"type": "function", "function": function}


@pytest.mark.parametrize("key", ["parameters", "input"])
def test_arguments_by_another_name_are_refused(key: str) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "now", key: {"zone": "UTC"}}]}
    with pytest.raises(ValueError, match=f"'m.tool_calls' has a call of now with '{key}'; 'arguments' is the key"):
        parse_message(turn, "m")


@pytest.mark.parametrize("turn", [ASK, {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "1"}])
@pytest.mark.parametrize("key", REASONING)
def test_thoughts_of_others_are_refused(turn: dict[str, Any], key: str) -> None:
    """Templates read those of the assistant only."""
    with pytest.raises(ValueError, match=f"'m' of '{turn['role']}' has thoughts, and only the assistant's are read"):
        parse_message({**turn, key: "Hm."}, "m")
    assert parse_message({**turn, key: ""}, "m").content == turn["content"]


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}'])
def test_json_in_texts_is_as_strict_as_that_of_rows(text: str) -> None:
    call = {"function": {"name": "now", "arguments": text}}
    with pytest.raises(ValueError, match=r"'arguments of now in m\.tool_calls' is not JSON"):
        parse_message({"role": "assistant", "content": "", "tool_calls": [call]}, "m")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "text"])
def test_every_format_carries_the_variables_of_the_template(name: str) -> None:
    for given_kwargs in ({"enable_thinking": False, "x": None}, '{"enable_thinking": false}'):
        row, _ = convert(name, {**ROWS[name], "chat_template_kwargs": given_kwargs})
        assert {json.dumps(json.loads(each.template_kwargs)) for each in conversations_of(row)} == {
            '{"enable_thinking": false}'
        }
    row, _ = convert(name, {**ROWS[name], "chat_template_kwargs": None})
    assert {each.template_kwargs for each in conversations_of(row)} == {""}
    _, faults = convert(name, {**ROWS[name], "chat_template_kwargs": {"messages": []}})
    assert "'chat_template_kwargs.messages' is not set by hand" in refusal(faults)
    _, faults = convert(name, {**ROWS[name], "chat_template_kwargs": [1]})
    assert "'chat_template_kwargs' is a list, not an object" in refusal(faults)


def test_variables_reach_the_template_and_unread_ones_are_refused() -> None:
    source = "{{ 'thinks' if enable_thinking | default(true) else 'answers' }} {{ messages[0].content }}"
    turns = [parse_message(ASK, "m")]
    assert ChatTemplate(source, {}, "a test").render(turns) == "thinks Hi?"
    off = ChatTemplate(source, {}, "a test", {"enable_thinking": False})
    assert off.render(turns) == "answers Hi?"
    assert off.render(turns, kwargs='{"enable_thinking": true}') == "thinks Hi?"
    ahead = off.prerender_prompts([Prompt(tuple(turns), template_kwargs='{"enable_thinking": true}')])
    assert ahead.prompt(turns, "", '{"enable_thinking": true}') == "thinks Hi?"
    assert ahead.prompt(turns) == "answers Hi?"
    with pytest.raises(UserError, match="has no variable 'thinking', which chat_template_kwargs sets"):
        ChatTemplate(source, {}, "a test", {"thinking": False})
    with pytest.raises(UserError, match="has no variable 'thinking'"):
        off.render(turns, kwargs='{"thinking": true}')


def test_a_margin_is_read_by_the_stages_that_have_one() -> None:
    able = frozenset({"margins", "ranked"})
    pair = ROWS["trl_preference"]
    for value, margin in ((0.5, 0.5), (-2, -2.0), ("1.5", 1.5), (None, None), ("", None)):
        row, _ = convert("trl_preference", {**pair, "margin": value}, capabilities=able)
        assert row.margin == margin
    for value in (True, "much", float("nan"), 1e7, [1], 10**400):
        _, faults = convert("trl_preference", {**pair, "margin": value}, capabilities=able)
        assert "'margin' is " in refusal(faults)
        assert "a number from -1e+06 to 1e+06 is needed" in refusal(faults)
    _, faults = convert("trl_preference", {**pair, "margin": 1})
    assert "has the columns 'margin', which trl_preference does not read" in refusal(faults)
    row, _ = convert("trl_preference", {**pair, "margin": 1}, [ALL])
    assert row.margin is None
    _, faults = convert("ranked", {**ROWS["ranked"], "margin": 1}, capabilities=able)
    assert "'margin' belongs to a pair of answers" in refusal(faults)


def test_ranked_answers_are_refused_where_nothing_makes_pairs() -> None:
    _, faults = convert("ranked", ROWS["ranked"], capabilities=frozenset())
    assert "has ranked answers, which are not read here" in refusal(faults)


@given(
    st.recursive(st.text("ab{}") | st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=8),
    st.dictionaries(st.text("ab{}", min_size=1, max_size=3), st.text("xy", max_size=3), max_size=3),
)
def test_filling_is_literal_and_done_at_once(value: Any, texts: dict[str, str]) -> None:
    found = filled({"ab": value}, texts)
    assert list(found) == ["ab"]
    assert filled(value, {}) is value
    if isinstance(value, str) and len(texts) == 1:
        ((text, given),) = texts.items()
        assert found["ab"] == value.replace(text, given)


def test_an_empty_text_is_not_replaced() -> None:
    assert [key for key, _ in fill_problems({"": "x"})] == ["fill"]
    assert list(fill_problems({"a": ""})) == []


def test_filled_texts_are_not_replaced_again() -> None:
    texts = {"{{NAME}}": "{{AUTHOR}}", "{{AUTHOR}}": "Ada", "{{": "["}
    assert filled("{{NAME}} by {{AUTHOR}} {{x", texts) == "{{AUTHOR}} by Ada [x"
    turns = [{"role": "user", "content": "{{AUTHOR}}?"}]
    assert filled({"{{AUTHOR}}": turns, "n": 3}, texts) == {
        "{{AUTHOR}}": [{"role": "user", "content": "Ada?"}],
        "n": 3,
    }


def test_rows_are_filled_before_their_columns_are_read() -> None:
    rules = ColumnRules(sources={"instruction": "q", "output": "a"}, fill={"{{NAME}}": "Ada"})
    converter = RowConverter("conversation", "auto", FORMATS, rules)
    found = converter.convert("rows:1", {"q": "Who?", "a": "{{NAME}}."}, None, Faults())
    assert [message.content for message in found.messages] == ["Who?", "Ada."]


def nested(depth: int) -> list[Any]:
    value: list[Any] = ["{{NAME}}"]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("sources", [{}, {"instruction": "instruction", "output": "output", "input": "deep"}])
def test_a_row_that_is_too_deep_to_fill_is_faulty(sources: dict[str, str]) -> None:
    row = {"instruction": "Who?", "output": "{{NAME}}.", "deep": nested(900)}
    converter = RowConverter("conversation", "auto", FORMATS, ColumnRules(sources, fill={"{{NAME}}": "Ada"}))
    faults = Faults()
    assert converter.convert("rows:1", row, None, faults) is None
    assert "rows:1: is nested too deeply" in refusal(faults)


@pytest.mark.parametrize(
    "rules",
    [
        ColumnRules(ignored=["deep"], fill={"{{NAME}}": "Ada"}),
        ColumnRules({"instruction": "instruction", "output": "output"}, fill={"{{NAME}}": "Ada"}),
    ],
)
def test_columns_that_are_left_out_are_not_filled(rules: ColumnRules) -> None:
    row = {"instruction": "Who?", "output": "{{NAME}}.", "deep": nested(900)}
    found = RowConverter("conversation", "auto", FORMATS, rules).convert("rows:1", row, None, Faults())
    assert [message.content for message in found.messages] == ["Who?", "Ada."]


QUESTION = [{"role": "user", "content": "Hi?"}]
YES = {"role": "assistant", "content": "Yes."}
NO = {"role": "assistant", "content": "No."}


@pytest.mark.parametrize(
    ("name", "row", "place"),
    [
        ("trl_preference", {"prompt": QUESTION, "chosen": [{**YES, "weight": 0.5}], "rejected": [NO]}, "chosen[0]"),
        ("trl_preference", {"prompt": [{**QUESTION[0], "weight": 0}], "chosen": [YES], "rejected": [NO]}, "prompt[0]"),
        (
            "sharegpt_preference",
            {
                "conversations": [{"from": "human", "value": "Hi?"}],
                "chosen": {"from": "gpt", "value": "Yes."},
                "rejected": {"from": "gpt", "value": "No.", "weight": 2},
            },
            "rejected",
        ),
        ("ranked", {"prompt": "a", "responses": ["b", {**YES, "weight": 1}], "scores": [1, 2]}, "responses[1]"),
        ("trl_unpaired", {"prompt": "a", "completion": [{**YES, "weight": 2}], "label": True}, "completion[0]"),
        ("openai_unpaired", {"messages": [*QUESTION, {**YES, "weight": 2}], "label": True}, "messages[1]"),
        ("prompt", {"prompt": [{**QUESTION[0], "weight": 0}]}, "prompt[0]"),
        ("openai_prompt", {"messages": [*QUESTION, {**YES, "weight": 0.5}]}, "messages[1]"),
    ],
)
def test_weights_are_refused_by_name_where_no_loss_reads_them(name: str, row: dict[str, Any], place: str) -> None:
    found, faults = convert(name, row)
    assert found is None
    message = refusal(faults)
    assert f"rows.jsonl:7: has '{place}.weight', and {FORMATS[name].kind} rows have no weights of turns" in message
    assert "--data.ignore_columns='[\"weight\"]'" in message
    for ignored in (["weight"], [ALL]):
        assert convert(name, row, ignored)[0] is not None


def test_a_weight_of_a_prompt_is_refused() -> None:
    row = {"prompt": [*QUESTION, {**NO, "weight": 0.5}, *QUESTION], "completion": [YES]}
    found, faults = convert("trl_completion", row)
    assert found is None
    assert "'prompt[1]' is to be supervised, and only the completion is" in refusal(faults)
    row["prompt"][1]["weight"] = 0
    assert convert("trl_completion", row)[0] is not None
