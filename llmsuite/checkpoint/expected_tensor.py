"""Checks the dtype and shape of an untrusted tensor before it is used, for all readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from llmsuite.base.errors import UserError

FLOATS = ("float64", "float32", "float16", "bfloat16")
WORDS = ("int32",)
INDEXES = ("int32", "int64")


class TensorLike(Protocol):
    """Name, shape and dtype of a tensor."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class ExpectedTensor:
    """Allowed dtypes and shape of a tensor."""

    dtypes: Sequence[str]
    shape: tuple[int | tuple[int, ...] | None, ...] | None = None
    """For each dim its size, or a tuple of allowed sizes, or None for any size above 0; None for any shape."""

    def check(self, found: TensorLike, where: Path, why: str = "") -> None:
        """Raise UserError unless a tensor fits.

        Args:
            found: the tensor.
            where: the file or directory, for messages.
            why: the reason for the shape, for messages.
        """
        if found.dtype not in self.dtypes:
            raise UserError(f"{where}: {found.name!r} is {found.dtype}; {' or '.join(self.dtypes)} is needed")
        if self.shape is None:
            return
        if len(found.shape) != len(self.shape) or not all(map(_fits, found.shape, self.shape)):
            expected = ", ".join("?" if size is None else str(size) for size in self.shape)
            raise UserError(f"{where}: {found.name!r} is {list(found.shape)}; {why} has [{expected}]")


def check_scales(values: np.ndarray, name: str, where: Path) -> np.ndarray:
    """Return scales in float32 if all are finite: any other would spoil all weights of its block.

    Args:
        values: the stored scales.
        name: of their tensor, for messages.
        where: its file, for messages.

    Raises:
        UserError: one is NaN or infinite in float32.
    """
    with np.errstate(over="ignore"):  # float64 that overflows becomes infinite, and is reported below
        found: np.ndarray = values.astype("float32", copy=False)
    if count := int(np.count_nonzero(~np.isfinite(found))):
        raise UserError(
            f"{where}: {name!r} has {count:,} scales that are not finite (NaN or infinite), so the weights of their "
            "blocks are lost; use another copy, or an earlier checkpoint"
        )
    return found


def _fits(size: int, expected: int | tuple[int, ...] | None) -> bool:
    if expected is None:
        return size > 0
    if isinstance(expected, tuple):
        return size in expected
    return size == expected
