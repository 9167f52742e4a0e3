"""Rows that are to be answered: a text, turns as OpenAI has them, or TRL's prompt of turns."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError
from llmsuite.inference.prompts import Prompter
from tests.paths import DATA

TURNS = [{"role": "user", "content": "What is 7 plus 5?"}]


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(TextTokenizer(DATA / "tokenizer"), "tokenizer")


def test_all_shapes_ask_the_same(prompter: Prompter) -> None:
    rows: list[Any] = ["What is 7 plus 5?", {"prompt": "What is 7 plus 5?"}, {"messages": TURNS}, {"prompt": TURNS}]
    asked = [prompter.row(row).ids for row in rows]
    assert asked[0]
    assert asked == [asked[0]] * 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has to have either"),
        ({"prompt": TURNS, "messages": TURNS}, "has to have either"),
        ({"prompt": 5}, "list of turns"),
        ({"prompt": []}, "list of turns"),
    ],
)
def test_others_are_refused(prompter: Prompter, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prompter.row(row)
