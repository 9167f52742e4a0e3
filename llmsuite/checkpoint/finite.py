"""Counts NaN and infinite values of weights while they are written; they are refused unless the user allows them.

They are counted by their bits, about as fast as memory is read: all bits of the exponent are set in them, and in FP8
(e4m3fn), which has no infinity, all but the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.stored import FP8, read_header

OnNonFinite = Callable[[str, int, int], None]
"""Called with the name of a tensor, its number of values that are not finite, and its size. It may raise."""
_BITS = {
    "float64": ("uint64", 0x7FF0_0000_0000_0000),
    "float32": ("uint32", 0x7F80_0000),
    "float16": ("uint16", 0x7C00),
    "bfloat16": ("uint16", 0x7F80),
    FP8: ("uint8", 0x7F),
}
_BLOCK = 1 << 20
"""Values that are checked together: bounds the memory of the mask."""


def describe_nonfinite(where: Path | str, name: str, count: int, size: int) -> str:
    """Return the message about a tensor with values that are not finite."""
    return f"{where}: {name!r} has {count:,} of {size:,} values that are not finite (NaN or infinite)"


class NonFiniteError(UserError):
    """Weights that were to be written have values that are NaN or infinite."""

    def __init__(self, what: str):
        """`what` is a text of `describe_nonfinite`."""
        super().__init__(
            f"{what}; nothing was written. A run that diverged or a damaged file has such values; --allow-nonfinite "
            "writes them anyway"
        )


def count_nonfinite(values: np.ndarray) -> int:
    """Return the number of NaN and infinite values of an array; 0 for integers."""
    encoding = _BITS.get(values.dtype.name)
    if encoding is None:
        return 0
    kind, bits = encoding
    flat = np.ascontiguousarray(values).reshape(-1).view(kind)
    mask = np.array(bits, kind)
    blocks = (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))
    return sum(int(np.count_nonzero((block & mask) == mask)) for block in blocks)


def raise_on_nonfinite(where: Path | str) -> OnNonFinite:
    """Return an `OnNonFinite` that raises NonFiniteError; `where` is the source of the weights."""

    def refuse(name: str, count: int, size: int) -> None:
        raise NonFiniteError(describe_nonfinite(where, name, count, size))

    return refuse


def first_nonfinite(paths: Iterable[Path]) -> str | None:
    """Return the message about the first tensor of safetensors files with values that are not finite; None without any.

    Reads 1 MB at a time.
    """
    for path in paths:
        for name, stored in read_header(path).items():
            count = sum(count_nonfinite(np.frombuffer(chunk, stored.dtype)) for chunk in stored.chunks())
            if count:
                return describe_nonfinite(path, name, count, int(np.prod(stored.shape, dtype="int64")))
    return None
