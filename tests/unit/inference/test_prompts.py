"""Rows that are to be answered: a text, turns as OpenAI has them, or TRL's prompt of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.data.keys import ColumnRules
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.prompts import Prompter
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import DATA, ROOT

TURNS = [{"role": "user", "content": "What is 7 plus 5?"}]


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(TextTokenizer(DATA / "tokenizer"), "tokenizer")


def test_all_shapes_ask_the_same(prompter: Prompter) -> None:
    rows: list[Any] = ["What is 7 plus 5?", {"prompt": "What is 7 plus 5?"}, {"messages": TURNS}, {"prompt": TURNS}]
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "7 plus 5?"}]
    rows.append({"messages": [{"role": "user", "content": parts}]})
    asked = [prompter.row(row).ids for row in rows]
    assert asked[0]
    assert asked == [asked[0]] * 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has to have either"),
        ({"prompt": TURNS, "messages": TURNS}, "has to have either"),
        ({"prompt": 5}, "list of turns"),
        ({"prompt": []}, "list of turns"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is a part of type 'image'; only parts"),
        (
            {"messages": [{"role": "user", "content": ["Hi?"]}]},
            "is a string; a part is an object with type and text",
        ),
        ({"messages": [{"role": "assistant", "content": "12"}]}, "has only the assistant's turn"),
        ({"prompt": [*TURNS, {"role": "assistant", "content": "1"}]}, "no turn is continued"),
    ],
)
def test_others_are_refused(prompter: Prompter, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prompter.row(row)


@pytest.mark.parametrize("given", [{}, {"answer": None}, {"answer": "twelve"}])
def test_an_answer_at_the_end_is_not_shown(prompter: Prompter, given: dict[str, Any]) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "12"}]
    found = prompter.row({"messages": turns, **given})
    assert found.ids == prompter.row({"messages": TURNS}).ids
    assert found.row == {"messages": turns, "answer": given.get("answer") or "12"}


def test_columns_and_tables(prompter: Prompter, tmp_path: Path) -> None:
    """A file of any kind, with the prompt made of its columns, which stay in the answers."""
    table = tmp_path / "rows.csv"
    table.write_text("id,a,b,prompt\n3,7,5,other\n")
    (found,) = prompter.read(table, ColumnRules({"prompt": "What is {a} plus {b}?"}))
    assert found.ids == prompter.row("What is 7 plus 5?").ids
    assert found.row == {"id": "3", "a": "7", "b": "5", "prompt": "What is 7 plus 5?"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"talk": TURNS, "prompt": 5}) + "\n")
    assert prompter.read(rows, ColumnRules({"messages": "talk"}))[0].ids == found.ids  # the other column is no prompt
    answered = tmp_path / "answered.jsonl"
    answered.write_text(json.dumps({"talk": [*TURNS, {"role": "assistant", "content": "12"}]}) + "\n")
    (shown,) = prompter.read(answered, ColumnRules({"messages": "talk"}))
    assert shown.ids == found.ids
    assert shown.row["answer"] == "12"
    for columns, message in (({"prompt": "x"}, "has no column 'x'"), ({}, "list of turns")):
        with pytest.raises(UserError, match=rf"rows\.jsonl:1: .*{message}"):
            prompter.read(rows, ColumnRules(columns))
    rows.write_text('"Hi?"\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:1: is a string, which has no columns"):
        prompter.read(rows, ColumnRules({"prompt": "x"}))


@pytest.mark.parametrize(
    ("columns", "key", "message"),
    [
        ({"instruction": "a"}, "data.columns", "this stage has one field: prompt or messages"),
        ({"prompt": "{a"}, "data.columns.prompt", "has a brace without its counterpart"),
    ],
)
def test_columns_are_checked_with_the_recipe(
    columns: dict[str, str], key: str, message: str, tmp_path: Path, registry: Registry
) -> None:
    path = tmp_path / "recipe.json"
    recipe = json.loads((ROOT / "recipes/llama/infer.json").read_text())
    recipe["data"]["columns"] = columns
    path.write_text(json.dumps(recipe))
    with pytest.raises(RecipeError) as caught:
        plan_run(path, [], registry)
    assert [(problem.key, message in problem.message) for problem in caught.value.problems] == [(key, True)]
