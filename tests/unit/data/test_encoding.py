"""Tokens of answers after their prompts, and texts of single tokens, with tokenizers of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.data.encoding import encode_answers, encode_continuations
from llmsuite.data.tokenizer import TextTokenizer
from tests.support import tokenizers

KINDS = sorted(tokenizers.kinds())
PUT_IN_FRONT = {"sentencepiece-normalizer", "sentencepiece-always", "sentencepiece-first", "bytes-space"}
"""Those that begin a text with a space that it does not have."""
PARTS = st.lists(
    st.sampled_from([*tokenizers.WORDS, " ", "  ", "\n", ".", "[INST]", "</s>", "x", "7", "é", "世", "🙂"]), max_size=8
).map("".join)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    root: Path = tmp_path_factory.mktemp("kinds")
    return {
        name: TextTokenizer(tokenizers.write(root / name, tokenizer)) for name, tokenizer in tokenizers.kinds().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_anchors_are_needed_if_a_prefix_is_added(opened: dict[str, TextTokenizer], kind: str) -> None:
    assert bool(opened[kind].anchors) == (kind in PUT_IN_FRONT)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(prompt=PARTS.filter(bool), answer=PARTS)
def test_an_answer_has_its_tokens_after_the_prompt(
    opened: dict[str, TextTokenizer], kind: str, prompt: str, answer: str
) -> None:
    tokenizer = opened[kind]
    ((before, ids),) = encode_answers([(prompt, prompt + answer)], tokenizer)
    assert before == tokenizer.encode(prompt)  # as generation has it
    whole = tokenizer.encode(prompt + answer)
    if whole[: len(before)] == before:
        assert before + ids == whole
    else:  # a token spans the border: other tokens, of the same text
        assert tokenizer.decode(before + ids, False) == tokenizer.decode(whole, False)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(turns=st.lists(PARTS, max_size=6), other=PARTS)
def test_parts_of_a_growing_text_have_the_tokens_of_the_full_text(
    opened: dict[str, TextTokenizer], kind: str, turns: list[str], other: str
) -> None:
    tokenizer = opened[kind]
    texts = ["".join(turns[:count]) for count in range(1, len(turns) + 1)]
    pairs = list(zip([*texts, other], [*texts[1:], other + "x", *texts[-1:]]))
    found = encode_answers(pairs, tokenizer)
    assert [before for before, _ in found] == [tokenizer.encode(before) for before, _ in pairs]
    assert found == [encode_answers([pair], tokenizer)[0] for pair in pairs]


def test_work_is_in_proportion_to_the_longest_of_growing_texts(opened: dict[str, TextTokenizer]) -> None:
    turns = 500
    texts = ["x 7</s>" * count for count in range(turns)]
    encoded = 0

    def encode(parts: Sequence[str]) -> list[list[int]]:
        nonlocal encoded
        encoded += sum(map(len, parts))
        return tokenizer.encode_batch(parts)

    tokenizer = opened["bytes"]
    assert tokenizer.borders is not None
    encode_answers(list(itertools.pairwise(texts)), tokenizer, encode)
    assert encoded < 10 * len(texts[-1])


@pytest.mark.parametrize("others", [["</s>x"], ["x</"], ["</s></s>"], ["s></"], ["a</s>b"]])
def test_texts_are_not_cut_within_a_token(tmp_path: Path, others: list[str]) -> None:
    made = tokenizers.kinds()["bytes"]
    made.add_tokens(others)
    tokenizer = TextTokenizer(tokenizers.write(tmp_path, made))
    parts = ["a", "x", "</s>", "</", "s>", "b", *others]
    for before, after in itertools.product(map("".join, itertools.product(parts, repeat=2)), parts):
        text = before + after
        found = encode_answers([(before, text), (text, text + "</s>")], tokenizer)
        assert [ids for ids, _ in found] == [tokenizer.encode(before), tokenizer.encode(text)]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(before=PARTS.filter(bool), text=PARTS)
def test_a_continuation_is_nothing_but_its_text(
    opened: dict[str, TextTokenizer], kind: str, before: str, text: str
) -> None:
    tokenizer = opened[kind]
    (ids,) = encode_continuations([text], tokenizer)
    if not before.endswith("</s>") and "</s>" not in text:  # some add a space after it, in full texts too
        assert (
            tokenizer.decode([*tokenizer.encode(before), *ids], False)
            == tokenizer.decode(tokenizer.encode(before), False) + text
        )
    if kind not in PUT_IN_FRONT:
        assert ids == tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=PARTS)
def test_texts_of_tokens_join_to_the_full_text(opened: dict[str, TextTokenizer], kind: str, text: str) -> None:
    tokenizer = opened[kind]
    ids = tokenizer.encode(text)
    first = next((number for number, token in enumerate(ids) if tokenizer.is_visible(token)), 0)
    found = [tokenizer.token_text(token, number == first) for number, token in enumerate(ids)]
    if all("\ufffd" not in each for each in found):
        assert "".join(found) == tokenizer.decode(ids)
    known = [tokenizer.token_bytes(token, number == first) for number, token in enumerate(ids)]
    assert b"".join(each or b"" for each in known).decode() == tokenizer.decode(ids)


def test_no_prefix_is_added_to_answers_of_llama_2(opened: dict[str, TextTokenizer]) -> None:
    tokenizer = opened["sentencepiece-normalizer"]
    prompt = "<s>[INST] capital of France [/INST]"
    ((_, ids),) = encode_answers([(prompt, prompt + " Paris</s>")], tokenizer)
    assert tokenizer.pieces([tokenizer.eos_id, *ids])[1:] == [" Paris", "</s>"]
    (alone,) = encode_continuations(["Paris"], tokenizer)
    assert tokenizer.token_id("▁") not in alone
    assert tokenizer.encode("Paris") == [tokenizer.token_id("▁Paris")]
