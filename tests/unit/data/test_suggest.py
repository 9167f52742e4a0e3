"""What columns probably are, by their names and values; and that whatever is proposed can be read and typed."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import redacted
from llmsuite.contract.registry import Registry
from llmsuite.data.faults import Faults
from llmsuite.data.keys import ColumnRules
from llmsuite.data.read import first_rows, raw_rows, read_rows
from llmsuite.data.row_converter import RowConverter
from llmsuite.data.suggest import (
    columns_option,
    correct_columns,
    key_option,
    near,
    shell_quoted,
    suggest_columns,
    suggest_text_column,
)
from llmsuite.recipe.load import load

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
NAMES = {
    "conversation": ["question", "answer"],
    "preference": ["question", "better", "worse"],
    "unpaired": ["question", "answer", "liked"],
    "prompt": ["question", "answer"],
}


@pytest.mark.parametrize(
    ("kind", "row", "columns"),
    [
        ("conversation", {"Question": "a", "Our Answer": "b"}, {"instruction": "Question", "output": "Our Answer"}),
        ("conversation", {"Frage": "a", "Antwort": "b"}, {"instruction": "Frage", "output": "Antwort"}),
        ("conversation", {"回答": "b", "问题": "a"}, {"instruction": "问题", "output": "回答"}),
        ("conversation", {"ask_text": "a", "myAnswer": "b"}, {"instruction": "ask_text", "output": "myAnswer"}),
        ("conversation", {"question's answer": "b", "x": "a"}, {"instruction": "x", "output": "question's answer"}),
        (
            "conversation",
            {"question": "a", "context": "c", "system_prompt": "s", "response": "b"},
            {"instruction": "question", "input": "context", "system": "system_prompt", "output": "response"},
        ),
        ("conversation", {"id": 1, "dialog": TURNS}, {"messages": "dialog"}),
        ("conversation", {"talk": SHAREGPT, "tools": "[]"}, {"conversations": "talk", "tools": "tools"}),
        ("conversation", {"alpha": "a", "beta": "b"}, None),
        ("conversation", {"question": "a", "answer": None}, None),
        ("preference", {"q": "a", "good": "b", "bad": "c"}, {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        (
            "preference",
            {"question": "a", "better_answer": "b", "worse_answer": "c"},
            {"prompt": "question", "chosen": "better_answer", "rejected": "worse_answer"},
        ),
        ("preference", {"messages": TURNS}, None),
        (
            "unpaired",
            {"query": "a", "reply": "b", "thumbs": "true"},
            {"prompt": "query", "completion": "reply", "label": "thumbs"},
        ),
        ("unpaired", {"q": "a", "reply": "b", "ok?": True}, {"prompt": "q", "completion": "reply", "label": "ok?"}),
        ("prompt", {"Frage": "a", "Antwort": "b", "n": 3}, {"prompt": "Frage", "n": "n", "answer": "Antwort"}),
        ("prompt", {"dialog": TURNS, "level": 1}, {"messages": "dialog", "level": "level"}),
        ("of a plugin", {"question": "a", "answer": "b"}, None),
    ],
)  # fmt: skip
def test_expected_columns_are_proposed(
    registry: Registry, kind: str, row: dict[str, Any], columns: dict[str, str] | None
) -> None:
    assert suggest_columns(row, kind, registry.data_formats) == columns


def test_a_format_that_is_chosen_gets_its_fields(registry: Registry) -> None:
    row = {"question": "a", "answer": "b"}
    for name, columns in {
        "trl_completion": {"prompt": "question", "completion": "answer"},
        "paddlenlp": {"src": "question", "tgt": "answer"},
        "openai": None,
    }.items():
        assert suggest_columns(row, "conversation", registry.data_formats, name) == columns


def test_the_column_of_text_is_suggested() -> None:
    assert suggest_text_column({"id": "1", "body": "a", "title": "b"}) == "body"
    assert suggest_text_column({"id": 1, "x": "a"}) == "x"
    assert suggest_text_column({"x": "a", "y": "b"}) is None


def test_typing_errors_are_corrected() -> None:
    row = {"ask": "a", "reply": "b"}
    right = {"instruction": "ask", "output": "reply"}
    for wrong in ({"instruction": "aks", "output": "reply"}, {"instrution": "ask", "output": "Reply"}):
        assert correct_columns(wrong, row) == right
    for columns in (right, {"instruction": "nothing", "output": "reply"}, {"output": "{ask} {rply}"}):
        assert correct_columns(columns, row) is None


NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def own_rows(draw: Any) -> tuple[str, dict[str, Any]]:
    """A kind of rows, and a row that has what it needs under names with any characters around them."""
    kind = draw(st.sampled_from(sorted(NAMES)))
    around = draw(st.lists(st.tuples(NAME, NAME), min_size=len(NAMES[kind]), max_size=len(NAMES[kind])))
    values = {name: f"some {name}" for name in NAMES[kind]} | {"liked": draw(st.sampled_from([True, False, "true"]))}
    row = {f"{before} {name}{after}": values[name] for name, (before, after) in zip(NAMES[kind], around)}
    row |= draw(st.dictionaries(NAME, st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]))))
    return kind, row


@settings(max_examples=150, deadline=None)
@given(own_rows())
def test_proposals_can_be_typed_and_read(
    registry: Registry, tmp_path_factory: pytest.TempPathFactory, made: tuple[str, dict[str, Any]]
) -> None:
    kind, row = made
    columns = suggest_columns(row, kind, registry.data_formats)
    if columns is None:
        return
    (word,) = shlex.split(shell_quoted(columns_option(columns)))
    assert word == columns_option(columns)
    assert word.isprintable()
    assert redacted(word) == word, "it is shown as it is"
    assert json.loads(word.partition("=")[2]) == columns
    place = tmp_path_factory.getbasetemp() / "rows.jsonl"
    place.write_text(json.dumps(row))
    assert len(read_rows(place, kind, "auto", registry.data_formats, columns=ColumnRules(columns))) == 1
    with pytest.raises(UserError) if _is_refused(kind, row, registry) else _nothing():
        read_rows(place, kind, "auto", registry.data_formats)


@settings(max_examples=100, deadline=None)
@given(NAME)
def test_any_name_can_be_typed_as_the_value_of_a_key(
    registry: Registry, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    from llmsuite.base.resources import bundled

    (word,) = shlex.split(shell_quoted(key_option("pretrain.key", name)))
    assert word.isprintable()
    recipe: Any = load(bundled("recipes") / "llama/pretrain.json", [word], registry).recipe
    assert recipe.pretrain.key == name


def test_most_names_of_columns_are_recognised(registry: Registry) -> None:
    """The property above is not empty."""
    for kind, names in NAMES.items():
        row = {f"my {name}": "true" if name == "liked" else name for name in names}
        assert suggest_columns(row, kind, registry.data_formats) is not None


@pytest.mark.parametrize(
    "text",
    ['[{"a": 1}, {"a": 2}]', '{"a": 1}\n{"a": 2}\n', "[]", "[{", '{"a": 1}', '[{"a": "é'],
    ids=["list", "lines", "empty", "cut", "object", "cut character"],
)
def test_the_first_rows_of_a_list_match_a_full_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode()[: -1 if "é" in text else None])
    found = []
    for read in (raw_rows, first_rows):
        try:
            found.append(list(read(path)))
        except UserError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [1 << 16, 1 << 20, 3 << 20])
def test_only_the_beginning_of_a_large_list_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = tmp_path / "a.json"
    rows = [{"a": "é" * size}, *({"a": "x" * 1000} for _ in range(8 * size // 1000))]
    path.write_text(json.dumps(rows, ensure_ascii=False))
    parts: list[int] = []
    from llmsuite.data import read

    whole = read._rows_of
    monkeypatch.setattr(read, "_rows_of", lambda data, *rest: parts.append(len(data)) or whole(data, *rest))
    assert next(first_rows(path))[1] == rows[0]
    assert parts[-1] <= max(1 << 20, 4 * 2 * size + 16)
    assert list(first_rows(path)) == list(raw_rows(path))


def _is_refused(kind: str, row: dict[str, Any], registry: Registry) -> bool:
    try:
        return RowConverter(kind, "auto", registry.data_formats).convert("", row, None, Faults("skip")) is None
    except UserError:
        return True


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_very_many_columns_get_no_proposal(registry: Registry) -> None:
    row = {"question_" * 50 + str(i): "a" for i in range(9_000)}
    began = time.process_time()
    assert suggest_columns({**row, "query": "a", "reply": "b"}, "conversation", registry.data_formats) is None
    assert near("question", {**row, "Question": 1}) is not None
    assert time.process_time() - began < 5
