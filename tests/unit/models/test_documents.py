"""Rows of several documents: no token sees another document, and each document is as if it were alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.devices import masks, ops, paddle_kernels
from llmsuite.models.rotation import positions
from tests.support.families import CASES, load
from tests.support.packed_documents import answers_of, documents_of, prompts, rows_of_documents, visible
from tests.support.paths import REFERENCE


@given(rows_of_documents)
def test_the_mask_is_causal_within_a_document(rows: list[list[int]]) -> None:
    mask = masks.document_mask(paddle.to_tensor(documents_of(rows)), paddle.float32)
    length = max(map(sum, rows))
    assert mask.shape == [len(rows), 1, length, length]
    assert np.array_equal(mask.numpy()[:, 0], np.where(visible(rows), 0.0, -1e9).astype("float32"))


@given(prompts)
def test_answers_see_their_prompt_and_themselves(rows: list[tuple[int, list[int]]]) -> None:
    begins, belongs = answers_of(rows)
    seen = [
        [j <= i and mine[0] == of and answer in (-1, mine[1]) for j, (of, answer) in enumerate(belongs)]
        for i, mine in enumerate(belongs)
    ]
    mask = masks.document_mask(paddle.to_tensor(begins[None]), paddle.float32).numpy()[0, 0]
    assert np.array_equal(mask == 0, seen)
    spans = masks.document_spans(paddle.to_tensor(begins[None])).numpy()[0]
    listed = [[*range(begin, end), *range(own, i + 1)] for i, (begin, end, own) in enumerate(spans.T)]
    assert listed == [np.flatnonzero(row).tolist() for row in seen]
    # a token's position is how many it sees before itself
    assert positions(paddle.to_tensor(begins[None])).tolist()[0] == [len(row) - 1 for row in listed]


def test_one_document_a_row_is_the_causal_mask() -> None:
    document_starts = paddle.zeros([2, 5], dtype="int64")
    for dtype in (paddle.float32, paddle.float16, paddle.bfloat16):
        mask = masks.document_mask(document_starts, dtype)
        causal = masks.causal_mask(5, 5, dtype)
        assert mask.dtype == causal.dtype
        assert np.array_equal(mask.numpy(), np.repeat(causal.numpy(), 2, 0))


@given(rows_of_documents)
def test_what_flash_attention_is_given_means_the_same(rows: list[list[int]]) -> None:
    """The definition in the documentation of `flashmask_attention`: of column j, row ends[j] and those below are
    masked, on top of causality."""
    ends = paddle_kernels.document_ends(paddle.to_tensor(documents_of(rows)), paddle.bfloat16)
    length = max(map(sum, rows))
    assert (ends.shape, ends.dtype) == ([len(rows), 1, length, 1], paddle.int32)
    at = np.arange(length)
    seen = (at[:, None] < ends.numpy()[:, 0, :, 0][:, None, :]) & (at <= at[:, None])
    assert np.array_equal(seen, visible(rows))


@given(prompts, st.integers(0, 3))
def test_flash_attention_of_answers_that_share_a_prompt(rows: list[tuple[int, list[int]]], padding: int) -> None:
    """Marked padding continues nothing; what it sees is of no account."""
    begins, _ = answers_of(rows)
    length = len(begins)
    marked = np.concatenate([begins, np.full(padding, -1)])
    ends = paddle_kernels.document_ends(paddle.to_tensor(marked[None]), paddle.bfloat16).numpy()[0, 0, :, 0]
    at = np.arange(length)
    seen = (at[:, None] < ends[None, :length]) & (at <= at[:, None])
    mask = masks.document_mask(paddle.to_tensor(begins[None]), paddle.float32).numpy()[0, 0]
    assert np.array_equal(seen, mask == 0)


def test_flash_attention_of_documents_is_asked_of_flashmask(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Any, k: Any, v: Any, startend_row_indices: Any, *, causal: bool) -> Any:
        assert causal
        at = paddle.arange(q.shape[1], dtype="int32")
        seen = paddle.logical_and(
            at.unsqueeze(-1) < startend_row_indices[:, :, :, 0].unsqueeze(2), at <= at.unsqueeze(-1)
        )
        return ops.attention(q, k, v, (seen.astype("float32") - 1.0) * 1e9)

    monkeypatch.setattr(F, "flashmask_attention", kernel)
    random = np.random.default_rng(0)
    q, k, v = (paddle.to_tensor(random.standard_normal([2, 9, heads, 8]).astype("float32")) for heads in (4, 2, 2))
    document_starts = paddle.to_tensor(documents_of([[4, 1, 3], [9]]))
    found = paddle_kernels.flash_attention(q, k, v, paddle_kernels.document_ends(document_starts, q.dtype))
    expected = ops.attention(q, k, v, masks.document_mask(document_starts, q.dtype))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-6)


def test_fused_rotary_of_rows_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes one rotation for all rows."""

    def kernel(q: Any, k: Any, v: Any, *, sin: Any, cos: Any, use_neox_rotary_style: bool) -> tuple[Any, Any, Any]:
        assert cos.shape == sin.shape == [1, q.shape[1], 1, q.shape[3]]
        first, second = paddle.split(q, 2, axis=-1)
        return q * cos + paddle.concat([-second, first], axis=-1) * sin, None, None

    monkeypatch.setattr(paddle.incubate.nn.functional, "fused_rotary_position_embedding", kernel)
    random = np.random.default_rng(0)
    x = paddle.to_tensor(random.standard_normal([2, 3, 2, 8]).astype("float32"))
    cos, sin = (paddle.to_tensor(random.standard_normal([2, 3, 1, 4]).astype("float32")) for _ in range(2))
    np.testing.assert_allclose(
        paddle_kernels.fused_rotary(x, cos, sin).numpy(), ops.rotary(x, cos, sin).numpy(), atol=1e-6
    )


@pytest.mark.parametrize("case", CASES)
def test_a_document_in_a_row_is_as_if_it_were_alone(case: str) -> None:
    model = load(REFERENCE / case)
    random = np.random.default_rng(0)
    rows = [[5, 9, 2], [14]]
    ids = random.integers(0, model.config.vocab_size, [2, 16])
    with paddle.no_grad():
        document_starts = paddle.to_tensor(documents_of(rows))
        packed = model.hidden_states(paddle.to_tensor(ids), document_starts=document_starts)[0].numpy()
        for row, lengths in enumerate(rows):
            for begin, length in zip(itertools.accumulate(lengths, initial=0), lengths):
                part = slice(begin, begin + length)
                alone = model.hidden_states(paddle.to_tensor(ids[row : row + 1, part]))[0].numpy()[0]
                np.testing.assert_allclose(packed[row, part], alone, rtol=0, atol=1e-5 * np.abs(alone).max())
        # another token in the first document changes nothing outside of it: not a bit of it, but for experts, whose
        # products have other rows then, which rounds the sums of the same ones differently
        limit = 1e-6 * np.abs(packed).max() if model.config.experts_key is not None else 0.0
        ids[0, 1] = (ids[0, 1] + 1) % model.config.vocab_size
        other = model.hidden_states(paddle.to_tensor(ids), document_starts=document_starts)[0].numpy()
        assert np.abs(other[0, 1:5] - packed[0, 1:5]).max() > 1e-3
        other[0, 1:5] = packed[0, 1:5]
        assert np.abs(other - packed).max() <= limit
        # without telling it would be seen
        joined = model.hidden_states(paddle.to_tensor(ids))[0].numpy()
        assert np.abs(joined[0, 5:] - other[0, 5:]).max() > 1e-3


NO_SHARED_PROMPTS = ("deepseek/", "qwen_hybrid/", "qwen_hybrid_moe/")
"""Families whose attention lets no answers share a prompt: each has its own (`engine.data.padding_free`)."""


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(NO_SHARED_PROMPTS)])
def test_answers_after_one_prompt_equal_answers_with_their_own_prompts(case: str) -> None:
    model = load(REFERENCE / case)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, [1, 16])
    begins, _ = answers_of([(5, [2, 3]), (2, [1, 0, 3])])
    with paddle.no_grad():
        document_starts = paddle.to_tensor(begins[None])
        shared = model.hidden_states(paddle.to_tensor(ids), document_starts=document_starts)[0].numpy()[0]
        for places in ([*range(7)], [*range(5), 7, 8, 9], [10, 11, 12], [10, 11, 13, 14, 15]):
            alone = model.hidden_states(paddle.to_tensor(ids[:, places]))[0].numpy()[0]
            np.testing.assert_allclose(shared[places], alone, rtol=0, atol=1e-5 * np.abs(alone).max())


def test_padding_that_is_marked_gets_no_position_beyond_the_row() -> None:
    """The form for load balancing of experts: -1 instead of the index where a document begins."""
    model = load(REFERENCE / "deepseek" / "v3")
    document_starts = paddle.to_tensor([[0, 0, 2, 2, -1, -1], [0, 1, 1, 1, 1, 1]])
    cos, sin, mask, counted = model.layer_inputs(0, 6, paddle.float32, document_starts)
    plain = model.layer_inputs(0, 6, paddle.float32, paddle.to_tensor([[0, 0, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1]]))
    for found, expected in zip((cos, sin, mask), plain):
        assert np.array_equal(found.numpy(), expected.numpy())
    assert counted.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
