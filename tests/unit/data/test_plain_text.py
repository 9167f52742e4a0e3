"""Rows of plain text: whole texts, and templates of text with the fields of a row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.recipe import DataSection
from llmsuite.data import conversation_formats
from llmsuite.data.faults import Faults
from llmsuite.data.keys import ColumnRules
from llmsuite.data.plain_text import plain_texts, text_template_format
from llmsuite.data.row_converter import RowConverter
from llmsuite.data.rows import Conversation

FORMATS = {f.name: f for f in conversation_formats.BUILTIN}
ABLE = frozenset({"plain_text"})
PAIRED = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n"
    "### Response:\n"
)
ALONE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:\n"
)


def convert(row: Any, template: str | None = None, name: str = "auto", **rules: Any) -> Conversation:
    """Convert a row as a stage of plain text does. Raises UserError with its fault."""
    columns = ColumnRules(**{"text_template": template, "capabilities": ABLE, **rules})
    faults = Faults()
    found = RowConverter("conversation", name, FORMATS, columns).convert("rows.jsonl:7", row, None, faults)
    faults.check()
    assert isinstance(found, Conversation)
    assert found.is_plain
    return found


def test_a_text_is_supervised_as_a_whole() -> None:
    row = convert({"text": "A document."})
    assert plain_texts(row) == ("", "A document.")
    assert row.supervised == (True,)
    assert convert({"text": "A document.", "id": 3}, ignored=["id"]) == row
    assert convert({"title": "A", "body": "document."}, sources={"text": "{title} {body}"}) == row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "id": 3}, "has the columns 'id', which text does not read"),
        ({"text": "a", "system": "Be brief."}, "'system' is there, and a row of text has no place for it"),
        ({"text": "a", "tools": [{"name": "f"}]}, "'tools' is there, and a row of text has no place for it"),
        ({"text": ["a"]}, "'text' is a list, not text"),
        ({"document": "a"}, "has no key 'text'"),
    ],
)
def test_a_faulty_row_of_text_is_refused(row: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:7: ") as caught:
        convert(row, name="text")
    assert message in str(caught.value)


def test_a_row_with_other_texts_is_no_row_of_text() -> None:
    with pytest.raises(UserError, match="fit no format with conversation rows"):
        convert({"text": "long", "summary": "short", "rating": 3})


@pytest.mark.parametrize(
    ("ignored", "option"),
    [
        ([], '--data.format=text --data.ignore_columns=\'["source", "id"]\'. Otherwise: '),
        (["*"], "--data.format=text. Otherwise: "),
    ],
)
def test_a_text_with_other_texts_may_be_trained_on_alone(ignored: list[str], option: str) -> None:
    row = {"text": "A document.", "source": "web", "id": 1}
    with pytest.raises(UserError) as caught:
        convert(row, ignored=ignored)
    assert f". To train on 'text' as plain text, add {option}" in str(caught.value)
    found = convert(row, name="text", ignored=ignored or ["source", "id"])
    assert plain_texts(found) == ("", "A document.")
    with pytest.raises(UserError) as caught:
        convert(row, ignored=ignored, capabilities=frozenset())
    assert "as plain text" not in str(caught.value)


def test_other_stages_refuse_plain_text() -> None:
    with pytest.raises(UserError, match="is plain text, and conversations are read here"):
        convert({"text": "a"}, capabilities=frozenset())


@pytest.mark.parametrize(
    ("template", "row", "texts"),
    [
        ("alpaca", {"instruction": "Add.", "input": "1, 2", "output": "3"}, (PAIRED, "3")),
        ("alpaca", {"instruction": "Add.", "input": "", "output": "3"}, (ALONE, "3")),
        ("alpaca", {"instruction": "Add.", "input": None, "output": "3"}, (ALONE, "3")),
        ("alpaca", {"instruction": "Add.", "output": "3"}, (ALONE, "3")),
        ("completion", {"prompt": "The sky is", "completion": " blue."}, ("The sky is", " blue.")),
        ("completion", {"prompt": "", "completion": "blue."}, ("", "blue.")),
        ("{text}", {"text": "A document."}, ("", "A document.")),
        ("Q: {q}\nA: {a}\n", {"q": "1+1?", "a": 2}, ("Q: 1+1?\nA: ", "2\n")),
        ("{{q}}{q}{{{a}}}", {"q": "{a}", "a": "{0.__class__}"}, ("{q}{a}{", "{0.__class__}}")),
        ("{q}{q} {a}", {"q": "x", "a": None}, ("xx ", "")),
        ("Q: {q}\nA: {a}\n###", {"q": "x", "a": ""}, ("Q: x\nA: ", "")),
        ("Q: {q}\nA: {a}\n###", {"q": "x", "a": " \n"}, ("Q: x\nA: ", "")),
    ],
)
def test_fields_are_put_into_a_template(template: str, row: Any, texts: tuple[str, str]) -> None:
    prompt, answer = texts
    found = convert(row, template)
    assert plain_texts(found) == (prompt, prompt + answer)
    assert found.supervised == ((False, True) if prompt else (True,))


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        ("alpaca", {"instruction": "a"}, "has no field 'output', which data.text_template takes: it has 'instruction'"),
        ("{question} {answer}", {"Question": "a", "answer": "b"}, "did you mean 'Question'?"),
        ("{q}{a}", {"q": "a", "a": ["b"]}, "field 'a' is a list; data.text_template takes texts and numbers"),
        ("{q}{a}", {"q": True, "a": "b"}, "field 'q' is true; data.text_template takes texts and numbers"),
        ("{q}{a}", {"q": "a", "a": "b", "c": 1}, "has the columns 'c', which data.text_template does not read"),
        ("{q}{a}", {"q": "a", "a": "b", "system": "Hi"}, "'system' is there, and data.text_template has no place"),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "has the columns 'history', which"),
    ],
)
def test_a_row_that_does_not_fit_a_template_is_refused(template: str, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:7: ") as caught:
        convert(row, template)
    assert message in str(caught.value)


def test_a_system_prompt_may_be_a_field() -> None:
    assert plain_texts(convert({"system": "Hi.", "a": "b"}, "{system}\n{a}")) == ("Hi.\n", "Hi.\nb")


@given(values=st.tuples(st.text(max_size=9), st.text(max_size=9)), words=st.text(alphabet="a\n{} #", max_size=6))
def test_a_template_is_literal(values: tuple[str, str], words: str) -> None:
    escaped = words.replace("{", "{{").replace("}", "}}")
    data_format = text_template_format(f"{escaped}{{q}}{escaped}{{a}}{escaped}")
    found = data_format.convert({"q": values[0], "a": values[1]})
    prompt = f"{words}{values[0]}{words}"
    answer = f"{values[1]}{words}" if values[1].strip() or not words else ""
    assert plain_texts(found) == (prompt, f"{prompt}{answer}")


@pytest.mark.parametrize(
    ("given_template", "message"),
    [
        ("vicuna", "is 'vicuna'; known: alpaca, completion; a text of your own names its fields in braces"),
        ("{q", "has a brace without its counterpart"),
        ("{}", "has {} without the name of a column"),
        ("{{q}}", "names no column"),
    ],
)
def test_a_faulty_template_is_a_problem_of_the_recipe(given_template: str, message: str) -> None:
    section = DataSection(train="a.jsonl", text_template=given_template)
    ((key, found),) = section.problems()
    assert key == "text_template"
    assert message in found


def test_keys_of_chat_templates_have_no_effect_on_text() -> None:
    unused = dict(DataSection(train="a.jsonl", text_template="alpaca").unused())
    of_turns = {"chat_template", "chat_template_kwargs", "supervise_thoughts", "system", "end_of_answer"}
    of_no_text = set(dict(DataSection(train="a.jsonl").unused()))
    assert unused.keys() - of_no_text == {"format", *of_turns}
    assert dict(DataSection(train="a.jsonl", format="text").unused()).keys() - of_no_text == of_turns
    assert not of_no_text & {"format", *of_turns}
