"""Thoughts of an answer are separated from its content, whatever the pieces in which it arrives."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.inference.thoughts import (
    CHANNEL_TOKENS,
    ChannelReader,
    ThoughtReader,
    has_channels,
    has_thoughts,
    opens_thoughts,
)

PIECES = st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", "a", "b c", "\n", " "])
TEXTS = st.lists(PIECES, max_size=9).map("".join)


def whole(text: str, is_opened: bool) -> tuple[str, str]:
    return ThoughtReader(is_opened).push(text, True)


@pytest.mark.parametrize(
    ("text", "is_opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nFour.", False, ("hm", "Four.")),
        ("hm\n</think>\n\nFour.", True, ("hm", "Four.")),
        ("<think>hm</think>Four.", True, ("hm", "Four.")),
        ("Four.", False, ("", "Four.")),
        ("Four <think>a</think>", False, ("", "Four <think>a</think>")),
        ("<think>\n\n</think>\n\nFour.", False, ("", "Four.")),
        ("hm </thi", True, ("hm </thi", "")),
        ("  Four.", False, ("", "  Four.")),
        ("", True, ("", "")),
    ],
)
def test_answers_are_split(text: str, is_opened: bool, expected: tuple[str, str]) -> None:
    assert whole(text, is_opened) == expected


def without_marks(text: str) -> str:
    """A text without marks, and without those that appear where one is taken out."""
    shorter = text.replace("<think>", "").replace("</think>", "")
    return text if shorter == text else without_marks(shorter)


@given(text=TEXTS, is_opened=st.booleans(), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_pieces_are_split_as_the_whole(text: str, is_opened: bool, cuts: list[int]) -> None:
    reader = ThoughtReader(is_opened)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    found = [reader.push(piece, False) for piece in pieces]
    found.append(reader.push("", True))
    assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == whole(text, is_opened)
    left = "".join("".join(whole(text, is_opened)).split())
    dropped = "".join(text.split())
    assert without_marks(left) == without_marks(dropped), "nothing but marks and white space is left out"


def test_prompts_that_open_thoughts() -> None:
    assert opens_thoughts("<|im_start|>assistant\n<think>\n")
    assert not opens_thoughts("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert has_thoughts("{{ '</think>' }}")
    assert not has_thoughts("{{ message.content }}")
    assert not has_thoughts(None)


CHANNELS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>well<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Four."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHANNELS, ("hm\nwell", "I look.Four.")),
        ("<|channel|>final<|message|>Four.", ("", "Four.")),
        ("<|channel|>analysis<|message|>hm", ("hm", "")),
        ("<|channel|>final<|message|>a <| b < c <|en", ("", "a <| b < c <|en")),
        ("Four.", ("", "Four.")),
        ("<|channel|>final", ("", "final")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assis", ("hm", "")),
        ("", ("", "")),
    ],
)
def test_messages_in_channels(text: str, expected: tuple[str, str]) -> None:
    assert ChannelReader().push(text, True) == expected
    for pieces in (list(text), re.findall("|".join(map(re.escape, CHANNEL_TOKENS)) + "|.", text)):
        reader = ChannelReader()
        found = [reader.push(piece, False) for piece in pieces]
        found.append(reader.push("", True))
        assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == expected


def test_templates_with_channels() -> None:
    assert has_channels("<|start|>assistant<|channel|>final<|message|>")
    assert not has_channels("<think></think>")
    assert not has_channels(None)
