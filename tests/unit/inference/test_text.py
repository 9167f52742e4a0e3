"""Stop texts that are, or have, special tokens; they are no part of an answer's text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.text import TextStream
from tests.paths import DATA

TOKENIZER = TextTokenizer(DATA / "tokenizer")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PARTS = (*SPECIAL, "a", "b", "\n", "é", "日", "<|im")


@given(
    st.lists(st.sampled_from(PARTS), max_size=10).map("".join),
    st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("".join), max_size=3),
)
def test_a_special_token_is_found_and_is_no_text(text: str, stop: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    stream, pieces = TextStream(TOKENIZER, stop), []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    visible = TOKENIZER.decode(ids)
    at = [text.find(each) for each in stop if each in text]
    shown = [visible.find(each) for each in stop if each in visible]
    assert "".join(pieces) == stream.text
    assert stream.text in visible
    if not at and not shown:
        assert (stream.stopped, stream.text) == (False, visible)
    if at and not shown:
        before = text[: min(at)]
        for token in SPECIAL:
            before = before.replace(token, "")
        assert (stream.stopped, stream.text) == (True, before)


@pytest.mark.parametrize("stop", ["<|endoftext|>", "b<|endoftext|>", "<|endoftext|>\n", "a b<|endoftext|>\n"])
def test_streams_hold_back_what_may_be_a_stop(stop: str) -> None:
    stream, pieces = TextStream(TOKENIZER, [stop]), list[str]()
    for token in TOKENIZER.encode("xa b<|endoftext|>\nc"):
        pieces += [] if stream.stopped else [stream.push(token)]
    assert stream.stopped
    assert "".join(pieces) == stream.text == "xa b<|endoftext|>\n".partition(stop)[0].replace("<|endoftext|>", "")


def test_a_half_character_in_front_of_a_special_token() -> None:
    ids = [*TOKENIZER.encode("日")[:-1], 0, *TOKENIZER.encode("a")]
    with_stop, without = TextStream(TOKENIZER, ["<|endoftext|>b"]), TextStream(TOKENIZER)
    for token in ids:
        with_stop.push(token)
        without.push(token)
    with_stop.finish()
    without.finish()
    assert with_stop.text == without.text
    assert with_stop.text.endswith("a")
