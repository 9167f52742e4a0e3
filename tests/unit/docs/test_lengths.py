"""Guides stay short: one page does one thing, in sentences that are read once."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from tests.support.paths import ROOT

GUIDE = ROOT / "docs" / "guide"
MOST_WORDS = 1200
MOST_WORDS_OF_A_SENTENCE = 20
"""The median of a page stays below it."""
REFERENCES = {"faq.md", "from-other-suites.md", "plugin-contract.md"}
"""Pages in which one looks up a message, an argument or a name; nobody reads them from the beginning to the end."""
PROJECT = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*PROJECT, *sorted((ROOT / "docs").glob("*.md")), *sorted(GUIDE.glob("*.md"))]


def prose(page: Path) -> str:
    """The text of a page without code blocks and comments."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def sentence_lengths(text: str) -> list[int]:
    """Words of each sentence outside of tables and headings. Code counts as one word, an item of a list as a sentence;
    fewer than three words are no sentence."""
    lengths = []
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text):
        lines = [line for line in paragraph.splitlines() if not line.lstrip().startswith(("|", "#", "!"))]
        plain = re.sub(r"`[^`]*`", "code", " ".join(lines))
        plain = re.sub(r"\]\([^)]*\)", "]", plain)
        lengths += [len(re.findall(r"\b\w\S*", sentence)) for sentence in re.split(r"(?<=[.:?!])\s", plain)]
    return [length for length in lengths if length >= 3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page: Path) -> None:
    words = len(prose(page).split())
    if page.name in REFERENCES:
        assert words > MOST_WORDS, f"{page.name} need not be an exception"
    else:
        assert words <= MOST_WORDS, f"{words} words: move numbers to docs/notes, other topics to pages of their own"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_a_page_are_short(page: Path) -> None:
    assert statistics.median(sentence_lengths(prose(page))) < MOST_WORDS_OF_A_SENTENCE


def test_sentences_are_counted_as_a_reader_does() -> None:
    text = (
        "# A heading\n\nOne two three. Four `a b c` six seven!\n\n- An [item](x.md) too\n- and another one\n\n| a | b |"
    )
    assert sentence_lengths(text) == [3, 4, 3, 3]
