"""Masks of attention, added to its scores: causal ones, those of rows of several documents, and those of generation.

Shapes: B batch, L query length, S key length.
"""

from __future__ import annotations

from typing import Any

import paddle

from llmsuite.base.typing import Tensor


def causal_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor:
    """Causal mask [1, 1, L, S], added to scores: 0 where query i sees key j (j <= i + S - L), else -1e9 (-1e4 in fp16,
    whose largest number is 65504). With a window W a query sees the last W of these keys."""
    last = num_keys - num_queries
    visible = paddle.tril(paddle.ones([num_queries, num_keys], dtype="float32"), last)
    if window is not None:
        visible = paddle.triu(visible, last - window + 1)
    return _to_added_mask(visible, dtype).unsqueeze([0, 1])


def document_mask(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`causal_mask` of rows of several documents, [B, 1, L, L]; arguments as in `document_spans`."""
    return span_mask(document_spans(document_starts, window), dtype)


def document_spans(document_starts: Tensor, window: int | None = None) -> Tensor:
    """The keys that each token sees in rows of several documents, [B, 3, L]: keys from the first index up to, but not
    including, the second one, and keys from the third index up to the token itself.

    `document_starts` [B, L] is, for each token, the index in the row where its document begins: the token's index minus
    its position. Where this number changes, a new part of the row begins. A part whose first token has that index is a
    new document. Any other part continues the first tokens of the last document before it, at its position: it sees
    those tokens and itself, but nothing between. So several answers can share one prompt.

    With a window W a token sees itself and the W - 1 positions of its document before its own.
    """
    at = paddle.arange(document_starts.shape[1], dtype=document_starts.dtype).expand_as(document_starts)
    is_start = paddle.logical_or(document_starts != document_starts.roll(1, 1), at == 0)
    nowhere = paddle.zeros_like(at)
    own = paddle.cummax(paddle.where(is_start, at, nowhere), 1)[0]
    begin = paddle.cummax(paddle.where(paddle.logical_and(is_start, document_starts == at), at, nowhere), 1)[0]
    end = paddle.minimum(begin + own - document_starts, own)
    if window is not None:
        before = window - 1
        begin = paddle.maximum(begin, begin + at - document_starts - before)
        end = paddle.maximum(begin, end)
        own = paddle.maximum(own, at - before)
    return paddle.stack([begin, end, own], 1)


def span_mask(spans: Tensor, dtype: Any) -> Tensor:
    """The mask [B, 1, L, L], added to scores, for the spans of `document_spans` [B, 3, L]."""
    begin, end, own = (part.unsqueeze(-1) for part in spans.unbind(1))
    at = paddle.arange(spans.shape[2], dtype=spans.dtype)
    of_document = paddle.logical_and(at >= begin, at < end)
    of_part = paddle.logical_and(at >= own, at <= at.unsqueeze(-1))
    return _to_added_mask(paddle.logical_or(of_document, of_part).astype("float32"), dtype).unsqueeze(1)


def step_mask(
    queries: Tensor, keys: Tensor, padding: Tensor, dtype: Any, prefix_len: int = 0, window: int | None = None
) -> Tensor:
    """The mask of a pass of generation over a batch that is padded on the left, [B, 1, L, S], added to scores.

    Args:
        queries: columns of the queries, [L].
        keys: columns of the keys, [S].
        padding: [B], number of padding columns of each row; they come after `prefix_len` columns that all queries see.
        dtype: dtype of the scores.
        prefix_len: number of columns of a prefix (prefix tuning).
        window: size of the attention window in columns, with the query's own; None for full causal attention.
    """
    hidden = (keys > queries.unsqueeze(1)).unsqueeze(0)
    if window is not None:
        hidden = paddle.logical_or(hidden, (keys <= queries.unsqueeze(1) - window).unsqueeze(0))
    padded = (keys < padding.unsqueeze(1) + prefix_len).unsqueeze(1)
    if prefix_len:
        padded = paddle.logical_and(padded, keys >= prefix_len)
    lowest = 1e4 if dtype == paddle.float16 else 1e9
    return (paddle.logical_or(hidden, padded).astype("float32") * -lowest).astype(dtype).unsqueeze(1)


def _to_added_mask(visible: Tensor, dtype: Any) -> Tensor:
    return ((visible - 1.0) * (1e4 if dtype == paddle.float16 else 1e9)).astype(dtype)
