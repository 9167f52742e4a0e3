"""Values of weights that are NaN or infinite: counted while weights are written, and refused unless they are wanted.

They are counted by their bits, about as fast as memory is read: all bits of the exponent are set in them, and in FP8
(e4m3fn), which has no infinity, all but the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.stored import FP8, read_header
from llmsuite.errors import UserError

OnNonFinite = Callable[[str, int, int], None]
"""Called with a tensor that has values that are not finite: its name, how many, and of how many. It may raise."""
_BITS = {
    "float64": ("uint64", 0x7FF0_0000_0000_0000),
    "float32": ("uint32", 0x7F80_0000),
    "float16": ("uint16", 0x7C00),
    "bfloat16": ("uint16", 0x7F80),
    FP8: ("uint8", 0x7F),
}
_BLOCK = 1 << 20
"""Values that are looked at together."""


def told(where: Path | str, name: str, count: int, size: int) -> str:
    """What a message says of a tensor that has such values."""
    return f"{where}: {name!r} has {count:,} of {size:,} values that are not finite (NaN or infinite)"


class NonFiniteError(UserError):
    """Weights that were to be written have values that are NaN or infinite."""

    def __init__(self, what: str):
        """`what` is of `told`."""
        super().__init__(
            f"{what}; nothing was written. A run that diverged or a damaged file has such; --allow-nonfinite writes "
            "them all the same"
        )


def count_nonfinite(values: np.ndarray) -> int:
    """How many values of an array are NaN or infinite; none of integers are."""
    if (form := _BITS.get(values.dtype.name)) is None:
        return 0
    kind, bits = form
    flat, mask = np.ascontiguousarray(values).reshape(-1).view(kind), np.array(bits, kind)
    blocks = (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))
    return sum(int(np.count_nonzero((block & mask) == mask)) for block in blocks)


def refuse_of(where: Path | str) -> OnNonFinite:
    """An `OnNonFinite` that raises NonFiniteError, for weights that come from somewhere."""

    def refuse(name: str, count: int, size: int) -> None:
        raise NonFiniteError(told(where, name, count, size))

    return refuse


def first_nonfinite(paths: Iterable[Path]) -> str | None:
    """What `told` says of the first tensor of safetensors files that has such values, None where none has; 1 MB at a
    time is read."""
    for path in paths:
        for name, stored in read_header(path).items():
            if count := sum(count_nonfinite(np.frombuffer(chunk, stored.dtype)) for chunk in stored.chunks()):
                return told(path, name, count, int(np.prod(stored.shape, dtype="int64")))
    return None
