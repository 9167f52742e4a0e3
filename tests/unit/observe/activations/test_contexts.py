"""The name of a token is that of all it sees, however rows are cut, padded and packed."""

from __future__ import annotations

import itertools

import numpy as np
import paddle
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.devices.masks import document_spans
from llmsuite.observe.activations.contexts import PADDING, contexts, select_tokens
from llmsuite.stages.answers import Answer, pack_inputs

texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5)


def alone(text: list[int]) -> list[int]:
    return [int(name) for name in contexts(np.array([text]))[0]]


@given(texts, st.integers(0, 4))
def test_padding_changes_nothing(rows: list[list[int]], more: int) -> None:
    lengths = np.array([len(row) for row in rows])
    ids = np.full([len(rows), lengths.max() + more], 3)
    for row, text in zip(ids, rows):
        row[: len(text)] = text
    found = contexts(ids, lengths=lengths)
    for row, text in zip(found, rows):
        assert row[: len(text)].tolist() == alone(text)
        assert (row[len(text) :] == PADDING).all()


@given(texts)
def test_a_document_of_a_packed_row_is_as_it_is_alone(documents: list[list[int]]) -> None:
    begins = np.cumsum([0, *map(len, documents[:-1])])
    starts = np.repeat(begins, [len(document) for document in documents])
    found = contexts(np.array([[*itertools.chain(*documents)]]), starts[None])
    assert found[0].tolist() == [name for document in documents for name in alone(document)]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=4), texts)
def test_answers_that_share_a_prompt_are_as_with_one_each(prompt: list[int], answers: list[list[int]]) -> None:
    row = [Answer(prompt, ids) for ids in answers]
    shared, own = (pack_inputs([row], 0, 1, shares_prompts=shares) for shares in (True, False))
    found = {}
    for packed in (shared, own):
        names = contexts(packed.batch["input_ids"], packed.batch.get("document_starts")).reshape(-1)
        found[packed is shared] = [names[at].tolist() for at in packed.positions]
    assert found[True] == found[False]


@given(texts, st.data())
def test_tokens_with_equal_hashes_attend_to_the_same_tokens(documents: list[list[int]], data: st.DataObject) -> None:
    """Checked with the spans that attention uses."""
    begins = np.cumsum([0, *map(len, documents[:-1])])
    starts = np.repeat(begins, [len(document) for document in documents])
    ids = np.array([*itertools.chain(*documents)])
    spans = document_spans(paddle.to_tensor(starts[None]))[0].numpy()
    seen = [(*ids[a:b], *ids[c : at + 1]) for at, (a, b, c) in enumerate(spans.T)]
    names = contexts(ids[None], starts[None])[0].tolist()
    i, j = (data.draw(st.integers(0, len(ids) - 1)) for _ in range(2))
    assert (names[i] == names[j]) == (seen[i] == seen[j])


def test_marked_padding_has_no_name() -> None:
    assert (contexts(np.array([[5, 6, 0, 0]]), np.array([[0, 0, -1, -1]]))[0] == PADDING).tolist() == [
        False, False, True, True,
    ]  # fmt: skip


def test_the_selected_tokens_are_the_same_in_any_order() -> None:
    names = contexts(np.random.default_rng(0).integers(0, 9, [40, 50]))
    some = set(names.reshape(-1)[select_tokens(names, 8)].tolist())
    assert 100 < len(some) < 500
    assert set(names[::-1].reshape(-1)[select_tokens(names[::-1], 8)].tolist()) == some
    assert len(select_tokens(names, 1)) == names.size
