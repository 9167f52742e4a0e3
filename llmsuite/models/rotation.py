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


def positions(document_starts: Tensor) -> Tensor:
    """Position of each token in its document, [B, L]; `document_starts` as in `CausalLM.hidden_states`."""
    return paddle.arange(document_starts.shape[1], dtype=document_starts.dtype) - document_starts.clip(min=0)


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
    angles = np.outer(np.arange(start, start + length), np.asarray(frequencies))
    cos, sin = (tensor_of((f(angles) * scale).astype("float32")).astype(dtype) for f in (np.cos, np.sin))
    if document_starts is None:
        return cos.unsqueeze([0, 2]), sin.unsqueeze([0, 2])
    in_document = positions(document_starts)
    return F.embedding(in_document, cos).unsqueeze(2), F.embedding(in_document, sin).unsqueeze(2)


def rotation_at(frequencies: Sequence[float], scale: float, positions: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
    """Cos and sin times scale at positions [B, L], [B, L, 1, K / 2] each; angles in float64, as in `rotation`."""
    angles = positions.astype("float64").unsqueeze([2, 3]) * tensor_of(np.asarray(frequencies, "float64"))
    cos, sin = ((f(angles) * scale).astype("float32").astype(dtype) for f in (paddle.cos, paddle.sin))
    return cos, sin
