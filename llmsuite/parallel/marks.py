"""What travels with the tokens of a micro-batch, in one tensor [B, L] of int64: where documents begin, which tokens are
padding, and under dropout their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from llmsuite.typing import Tensor

_KEYS = 1 << 32
"""How many keys there are, from -2^31."""


def marked(document_starts: Tensor | None, lengths: Any, shape: Sequence[int]) -> Tensor:
    """Document starts [B, L] with -1 for the padding behind the length of each row."""
    document_starts = paddle.zeros(shape, dtype="int64") if document_starts is None else document_starts
    is_padding = paddle.arange(shape[1]) >= paddle.to_tensor(lengths).unsqueeze(-1)
    return paddle.where(is_padding, paddle.full_like(document_starts, -1), document_starts)


def unmarked(document_starts: Tensor | None) -> Tensor | None:
    """Document starts without marks, for layers that do not ask for them; None where each row is one document."""
    if document_starts is None or not bool((document_starts > 0).any()):
        return None
    return document_starts.clip(min=0)


def with_keys(document_starts: Tensor | None, keys: Tensor) -> Tensor:
    """Document starts and keys, see `models.dropout.token_keys`, in one tensor: (start + 2) 2^32 + key, and 0 in place
    of start + 2 where there are no starts."""
    keys = keys.astype("int64")
    return keys if document_starts is None else (document_starts + 2) * paddle.to_tensor(_KEYS) + keys


def without_keys(together: Tensor) -> tuple[Tensor | None, Tensor]:
    """The two parts of `with_keys`."""
    half, count = paddle.to_tensor(_KEYS // 2), paddle.to_tensor(_KEYS)
    keys = (together + half) % count - half
    starts = (together - keys) // count - 2
    return (None if bool((starts < -1).all()) else starts), keys.astype("int32")
