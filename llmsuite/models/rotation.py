"""Rotary positions: the cos and sin that queries and keys are rotated by.

Shapes: B batch, L length, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of

_MAX_KEPT = 8
"""Number of pairs of tables that are kept: a model has one for each of its rotations and dtypes."""
_KEPT: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
"""Tables of cos and sin; the one that was used last comes last."""


def positions(document_starts: Tensor) -> Tensor:
    """Position of each token in its document, [B, L]; `document_starts` as in `CausalLM.hidden_states`."""
    starts = document_starts.clip(min=0)  # -1 marks padding, whose positions have no effect
    return paddle.arange(starts.shape[1], dtype=starts.dtype) - starts


def rotation(
    frequencies: Sequence[float],
    scale: float,
    start: int,
    length: int,
    dtype: Any,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """scale times cos and sin for the positions from `start`, [1, L, 1, K / 2], or with `document_starts` for the
    positions in documents, [B, L, 1, K / 2].

    Angles are computed in float64: in float32 those of large positions would be off.
    """
    cos, sin = _tables(frequencies, scale, start + length, dtype)
    if start or cos.shape[0] != length:
        cos = cos[start : start + length]
        sin = sin[start : start + length]
    if document_starts is None:
        return cos.unsqueeze([0, 2]), sin.unsqueeze([0, 2])
    in_document = positions(document_starts)
    return F.embedding(in_document, cos).unsqueeze(2), F.embedding(in_document, sin).unsqueeze(2)


def growth_factors(growth: tuple[float, int], at: Tensor, dtype: Any) -> Tensor:
    """The factors of queries at positions [B, L], [B, L, 1, 1]; `growth` as in `shape_spec.GroupedQuery`."""
    factor, length = growth
    return (1 + factor * paddle.log1p((at // length).astype("float32"))).astype(dtype).unsqueeze([2, 3])


def _tables(frequencies: Sequence[float], scale: float, length: int, dtype: Any) -> tuple[Tensor, Tensor]:
    """scale times cos and sin for at least the positions below `length`, [>= length, K / 2].

    They are kept on the device: to compute and to copy them takes longer than many a layer, and they are the same for
    all passes. Callers return views of them, which operations may turn into distributed tensors; the kept ones stay
    plain.
    """
    if not paddle.in_dynamic_mode():  # constants of a program
        return _new_tables(frequencies, scale, length, dtype)
    key = (tuple(frequencies), scale, str(dtype), str(paddle.framework._current_expected_place()))
    kept = _KEPT.pop(key, None)
    if kept is None:
        kept = _new_tables(frequencies, scale, length, dtype)
    elif kept[0].shape[0] < length:
        # twice as long at least: a text that is generated grows by a token at a time
        kept = _new_tables(frequencies, scale, max(length, 2 * kept[0].shape[0]), dtype)
    _KEPT[key] = kept  # as the last one
    while len(_KEPT) > _MAX_KEPT:
        _KEPT.pop(next(iter(_KEPT)), None)
    return kept


def _new_tables(frequencies: Sequence[float], scale: float, length: int, dtype: Any) -> tuple[Tensor, Tensor]:
    """`_tables` of this length."""
    angles = np.outer(np.arange(length), np.asarray(frequencies))
    cos, sin = (tensor_of((f(angles) * scale).astype("float32")).astype(dtype) for f in (np.cos, np.sin))
    return cos, sin


def rotation_at(frequencies: Sequence[float], scale: float, positions: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
    """Cos and sin times scale at positions [B, L], [B, L, 1, K / 2] each; angles in float64, as in `rotation`."""
    angles = positions.astype("float64").unsqueeze([2, 3]) * tensor_of(np.asarray(frequencies, "float64"))
    cos, sin = ((f(angles) * scale).astype("float32").astype(dtype) for f in (paddle.cos, paddle.sin))
    return cos, sin
