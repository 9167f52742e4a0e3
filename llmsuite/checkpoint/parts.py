"""What a tensor of a stranger's layout has to be before anything is computed of it: all readers ask here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from llmsuite.errors import UserError

FLOATS = ("float64", "float32", "float16", "bfloat16")
WORDS = ("int32",)
INDEXES = ("int32", "int64")


class Described(Protocol):
    """A tensor without its values."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Part:
    """The dtype and the shape of a tensor."""

    dtypes: Sequence[str]
    shape: tuple[int | tuple[int, ...] | None, ...] | None = None
    """Its sizes, or which they may be; None for any size above 0, and for any shape."""

    def check(self, found: Described, where: Path, why: str = "") -> None:
        """Raise UserError unless a tensor is so.

        Args:
            found: the tensor.
            where: the file or directory, for messages.
            why: what has that shape, for messages.
        """
        if found.dtype not in self.dtypes:
            raise UserError(f"{where}: {found.name!r} is {found.dtype}; {' or '.join(self.dtypes)} is needed")
        if self.shape is None:
            return
        if len(found.shape) != len(self.shape) or not all(map(_fits, found.shape, self.shape)):
            wanted = ", ".join("?" if size is None else str(size) for size in self.shape)
            raise UserError(f"{where}: {found.name!r} is {list(found.shape)}; {why} has [{wanted}]")


def check_scales(values: np.ndarray, name: str, where: Path) -> np.ndarray:
    """The values that a tensor's codes are multiplied with, in float32: one that is not finite would be in all of a
    block.

    Args:
        values: as they are stored.
        name: of their tensor, for messages.
        where: its file, for messages.

    Raises:
        UserError: one is NaN or infinite, in float32 too.
    """
    with np.errstate(over="ignore"):
        found: np.ndarray = values.astype("float32", copy=False)
    if count := int(np.count_nonzero(~np.isfinite(found))):
        raise UserError(
            f"{where}: {name!r} has {count:,} scales that are not finite (NaN or infinite), so no weight of their "
            "blocks is one; take another copy, or an earlier checkpoint"
        )
    return found


def _fits(size: int, wanted: int | tuple[int, ...] | None) -> bool:
    if wanted is None:
        return size > 0
    return size in wanted if isinstance(wanted, tuple) else size == wanted
