"""The rows under data/digits: right answers, about numbers that training never shows."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from tests.support.paths import DATA

DIGITS = DATA / "digits"
SPLITS = ("train", "eval")


def rows(kind: str, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DIGITS / kind / f"{split}.jsonl").read_text(encoding="ascii").splitlines()]


def answered(text: str) -> str:
    """The answer, by an independent reading of the question."""
    (number,) = re.findall(r"[0-9]{4}", text)
    if "largest" in text:
        return str(max(int(digit) for digit in number))
    if "backwards" in text:
        return "".join(reversed(number))
    return str(number[0] if re.search("first|begin", text) else number[3])


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_rejected_ones_are_not(split: str) -> None:
    for row in rows("sft", split):
        assert row["messages"][1]["content"] == row["answer"] == answered(row["messages"][0]["content"])
    for row in rows("preference", split):
        assert row["chosen"][0]["content"] == row["answer"] == answered(row["prompt"][0]["content"])
        assert row["rejected"][0]["content"] != row["answer"]


@pytest.mark.parametrize("split", SPLITS)
def test_form_has_digits_of_the_number_which_are_right_by_chance(split: str) -> None:
    found = rows("form", split)
    for row in found:
        text, said = (message["content"] for message in row["messages"])
        (number,) = re.findall(r"[0-9]{4}", text)
        assert row["answer"] == answered(text)
        assert len(said) == len(row["answer"])
        assert Counter(said) <= Counter(number)
    # a digit of four is right in some 30%, as some are equal; all of them are in order in some 6%
    right = sum(row["messages"][1]["content"] == row["answer"] for row in found) / len(found)
    assert 0.2 < right < 0.3


@pytest.mark.parametrize("split", SPLITS)
def test_sentences_are_true(split: str) -> None:
    for sentence in re.findall(r"[A-Z][^.]+\.", (DIGITS / "pretrain" / f"{split}.txt").read_text(encoding="ascii")):
        (said,) = re.findall(r"is ([0-9]+)", sentence)
        assert said == answered(sentence[: sentence.index(" is ")]), sentence


def test_numbers_of_evaluation_are_in_no_question_of_training() -> None:
    def asked(split: str) -> set[str]:
        texts = [row["messages"][0]["content"] for kind in ("sft", "form") for row in rows(kind, split)]
        texts += [row["prompt"][0]["content"] for row in rows("preference", split)]
        sentences = (DIGITS / "pretrain" / f"{split}.txt").read_text(encoding="ascii")
        return set(re.findall(r"[0-9]{4}", " ".join(texts))) | set(
            re.findall(r"([0-9]{4})(?: backwards)? is", sentences)
        )

    assert asked("train").isdisjoint(asked("eval"))
