"""Metadata of the tokens of a micro-batch, in one int64 tensor [B, L]: document starts, a mark for padding, and under
dropout the keys of the tokens. Pipelines send it along with the activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, shared_tensor_of, tensor_of

_KEYS = 1 << 32
"""Number of keys; they start at -2^31."""


def mark_padding(document_starts: Tensor | None, lengths: Any, shape: Sequence[int]) -> Tensor:
    """Document starts [B, L] with -1 for the padding after the `lengths` [B] of the rows."""
    document_starts = paddle.zeros(shape, dtype="int64") if document_starts is None else document_starts
    is_padding = paddle.arange(shape[1]) >= shared_tensor_of(lengths).unsqueeze(-1)
    return paddle.where(is_padding, paddle.full_like(document_starts, -1), document_starts)


def clear_padding_marks(document_starts: Tensor | None) -> Tensor | None:
    """Document starts without padding marks, for layers that do not need them; None where each row is one document."""
    if document_starts is None or not array_of((document_starts > 0).any()):
        return None
    return document_starts.clip(min=0)


def pack_token_values(document_starts: Tensor | None, keys: Tensor) -> Tensor:
    """Document starts and keys (`models.dropout.token_keys`) in one tensor: (start + 2) 2^32 + key, with 0 instead of
    start + 2 where there are no starts. Starts are at least -1, so start + 2 is at least 1."""
    keys = keys.astype("int64")
    return keys if document_starts is None else (document_starts + 2) * tensor_of(_KEYS) + keys


def unpack_token_values(packed: Tensor) -> tuple[Tensor | None, Tensor]:
    """Document starts (None if there were none) and keys, from the result of `pack_token_values`."""
    half = tensor_of(_KEYS // 2)
    count = tensor_of(_KEYS)
    keys = (packed + half) % count - half
    starts = (packed - keys) // count - 2
    return (None if array_of((starts < -1).all()) else starts), keys.astype("int32")
