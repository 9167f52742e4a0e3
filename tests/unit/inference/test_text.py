"""Stop texts that are, or have, special tokens; they are no part of an answer's text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.text import TextStream
from tests.support.chat_rows import write_tokenizer
from tests.support.paths import DATA

TOKENIZER = TextTokenizer(DATA / "tokenizer")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PARTS = (*SPECIAL, "a", "b", "\n", "é", "日", "<|im")


def coded(text: str, stop: list[str]) -> str:
    """A text as stop texts are found in it: one character for each special token that they have, none for others."""
    for number, token in enumerate(SPECIAL):
        text = text.replace(token, chr(0xE000 + number) if any(token in each for each in stop) else "")
    return text


@given(
    st.lists(st.sampled_from(PARTS), max_size=10).map("".join),
    st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("".join), max_size=3),
)
def test_a_special_token_is_found_and_is_no_text(text: str, stop: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    visible = TOKENIZER.decode(ids)
    shown = [visible.find(each) for each in stop if each in visible]
    # the first token that completes a stop text ends the answer
    stops = [coded(each, stop) for each in stop]
    prefixes = [coded(TOKENIZER.decode(ids[:count], False), stop) for count in range(len(ids) + 1)]
    ending = next((prefix for prefix in prefixes if any(each in prefix for each in stops)), None)
    assert "".join(pieces) == stream.text
    assert stream.text in visible
    if ending is None and not shown:
        assert (stream.stopped, stream.text) == (False, visible)
    if ending is not None and not shown:
        before = ending[: min(ending.find(each) for each in stops if each in ending)]
        for token in SPECIAL:
            before = before.replace(coded(token, [token]), "")
        assert (stream.stopped, stream.text) == (True, before)


@pytest.mark.parametrize("stop", ["<|endoftext|>", "b<|endoftext|>", "<|endoftext|>\n", "a b<|endoftext|>\n"])
def test_streams_hold_back_what_may_be_a_stop(stop: str) -> None:
    stream = TextStream(TOKENIZER, [stop])
    pieces = list[str]()
    for token in TOKENIZER.encode("xa b<|endoftext|>\nc"):
        pieces += [] if stream.stopped else [stream.push(token)]
    assert stream.stopped
    assert "".join(pieces) == stream.text == "xa b<|endoftext|>\n".partition(stop)[0].replace("<|endoftext|>", "")


def test_a_half_character_in_front_of_a_special_token() -> None:
    ids = [*TOKENIZER.encode("日")[:-1], 0, *TOKENIZER.encode("a")]
    with_stop = TextStream(TOKENIZER, ["<|endoftext|>b"])
    without = TextStream(TOKENIZER)
    for token in ids:
        with_stop.push(token)
        without.push(token)
    with_stop.finish()
    without.finish()
    assert with_stop.text == without.text
    assert with_stop.text.endswith("a")


def test_special_tokens_may_be_shown(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_tokenizer(tmp_path))
    text = "<|channel|>analysis<|message|>h\u00e9 hm<|end|>ok"
    for shown, stop, expected in (
        (("<|channel|>", "<|message|>", "<|end|>", "<|none|>"), (), text),
        (("<|message|>",), (), "analysis<|message|>h\u00e9 hmok"),
        ((), (), "analysish\u00e9 hmok"),
        (("<|channel|>", "<|message|>", "<|end|>"), ("<|end|>",), "<|channel|>analysis<|message|>h\u00e9 hm"),
    ):
        stream = TextStream(tokenizer, stop, shown)
        pieces = []
        for token in tokenizer.encode(text):
            pieces.append(stream.push(token))
            if stream.stopped:
                break
        assert "".join([*pieces, stream.finish()]) == stream.text == expected
