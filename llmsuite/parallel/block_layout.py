"""The blocks of 8-bit moments: which of them the elements of a rank belong to. Imports no Paddle.

A block is 256 consecutive elements of the full parameter in the order in which PyTorch stores it: a linear weight
[inputs, outputs] is flattened as [outputs, inputs]. Each matrix of a stack has its own blocks, as it is a parameter of
its own in transformers. So blocks are those of bitsandbytes, whatever part of the parameter a rank holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from llmsuite.models.dynamic_map import BLOCK


@dataclasses.dataclass(frozen=True)
class Box:
    """Consecutive elements of a rank's shard that are a matrix [rows, columns], full or a part of one."""

    start: int
    """Number of its first element in the shard."""
    rows: int
    columns: int
    first: int
    """Number of its first element in the order of blocks."""
    pitch: int
    """Distance of two lines in the order of blocks. A line is a column of a transposed matrix, and a row of others: its
    elements are consecutive."""
    is_transposed: bool

    @property
    def num_lines(self) -> int:
        return self.columns if self.is_transposed else self.rows

    @property
    def line_size(self) -> int:
        return self.rows if self.is_transposed else self.columns

    @property
    def max_blocks(self) -> int:
        """Number of blocks that its elements belong to; at most that many where lines begin inside of blocks."""
        last = self.first + (self.num_lines - 1) * self.pitch + self.line_size - 1
        spanned = last // BLOCK - self.first // BLOCK + 1
        if self.pitch % BLOCK == 0:
            of_line = (self.first % BLOCK + self.line_size - 1) // BLOCK + 1
        else:
            of_line = (self.line_size + BLOCK - 2) // BLOCK + 1
        return min(spanned, self.num_lines * of_line)


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """The elements of a full parameter that a rank's optimizer updates, as boxes."""

    shape: tuple[int, ...]
    """Shape of the full parameter without padding: [N], [rows, columns] or [matrices, rows, columns]."""
    is_transposed: bool
    """True where PyTorch stores the matrices of the parameter transposed."""
    local_shape: tuple[int, ...]
    """Shape on this rank before sharding over data ranks."""
    offsets: tuple[int, ...]
    """Index of the rank's first element before sharding, for each dim."""
    range: slice
    """The range of the flattened local value that the rank owns."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the full parameter."""
        return num_blocks(self.shape)

    @property
    def num_owned(self) -> int:
        return self.range.stop - self.range.start

    @property
    def is_cut(self) -> bool:
        """True where other ranks have other elements of the parameter."""
        return self.local_shape != self.shape or self.num_owned < math.prod(self.shape)

    @functools.cached_property
    def boxes(self) -> list[Box]:
        """The elements of the rank, in the order of its shard."""
        _, rows, columns = _as_stack(self.local_shape, 1)
        size = rows * columns
        found: list[Box] = []
        first = self.range.start
        while first < self.range.stop:
            matrix, inside = divmod(first, size)
            row, column = divmod(inside, columns)
            left = min(self.range.stop - first, size - inside)
            if column or left < columns:  # the rest of a row, or its beginning
                box = self._box(first, matrix, row, column, 1, min(columns - column, left))
            else:
                box = self._box(first, matrix, row, 0, left // columns, columns)
            found.append(box)
            first += box.rows * box.columns
        return found

    @property
    def max_own_blocks(self) -> int:
        """Number of blocks that the rank has elements of; at most that many where lines begin inside of blocks."""
        return min(self.num_blocks, sum(box.max_blocks for box in self.boxes))

    def _box(self, start: int, matrix: int, row: int, column: int, num_rows: int, num_columns: int) -> Box:
        """The box from an element of the local value on, which has these rows and columns."""
        _, rows, columns = _as_stack(self.shape, 1)
        offsets = _as_stack(self.offsets, 0)
        matrix += offsets[0]
        row += offsets[1]
        column += offsets[2]
        pitch = rows if self.is_transposed else columns
        inside = column * rows + row if self.is_transposed else row * columns + column
        first = matrix * _blocks_of(rows * columns) * BLOCK + inside
        return Box(start - self.range.start, num_rows, num_columns, first, pitch, self.is_transposed)


def num_blocks(shape: Sequence[int]) -> int:
    """Number of blocks of a parameter of this full shape."""
    matrices, rows, columns = _as_stack(shape, 1)
    return matrices * _blocks_of(rows * columns)


def _blocks_of(size: int) -> int:
    """Number of blocks of a matrix with so many elements. The next matrix of a stack begins a new block."""
    return -(-size // BLOCK)


def _as_stack(sizes: Sequence[int], missing: int) -> tuple[int, int, int]:
    """Sizes or offsets of a vector or a matrix as those of a stack of matrices."""
    assert 1 <= len(sizes) <= 3, sizes
    padded = [missing] * (3 - len(sizes)) + list(sizes)
    return padded[0], padded[1], padded[2]
