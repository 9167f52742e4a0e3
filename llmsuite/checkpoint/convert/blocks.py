"""Tensors that are stored in blocks, one or more by each rank of a run, read as full tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.tensors import TensorSpec

Index = Sequence[slice]
_MAX_BLOCKS = 1 << 14
"""Most blocks of a tensor (about one per rank): all pairs are compared for overlaps."""
_MAX_GAP_CHECKS = 1 << 20
"""Most pairs of a block and a cell to check for the position of a gap; beyond that the message has no position."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a tensor, `shape` elements from `offset` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    """File that holds it, for messages."""
    read: Callable[[Index], np.ndarray]
    """Reads a slice of it, with indices relative to `offset`."""

    def __str__(self) -> str:
        return f"{_region(self.offset, self.shape)} in {self.file}"


class BlockFiles:
    """A source of tensors made of blocks."""

    def __init__(self, where: Path, paths: Sequence[Path], specs: Mapping[str, TensorSpec]):
        """
        Args:
            where: name of the source, for messages.
            paths: its files.
            specs: the full tensors, by name.
        """
        self.where = where
        self._paths = sorted(paths)
        self._specs = dict(specs)
        self._blocks: dict[str, list[Block]] = {name: [] for name in specs}

    def add(self, name: str, blocks: Sequence[Block]) -> None:
        """Add the blocks of a tensor. Raises UserError unless they cover each element exactly once."""
        if problem := coverage_error(self._specs[name].shape, blocks):
            raise UserError(f"{self.where}: {name!r} of shape {list(self._specs[name].shape)}: {problem}")
        self._blocks[name] = list(blocks)

    @property
    def names(self) -> list[str]:
        return list(self._specs)

    @property
    def paths(self) -> list[Path]:
        return self._paths

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Return a tensor, or a slice of it; only the blocks that it needs are opened."""
        spec = self._specs[name]
        region = []
        for part, size in zip(index or _all(spec.shape), spec.shape):
            region.append((part.start or 0, size if part.stop is None else part.stop))
        result = np.empty([stop - start for start, stop in region], dtype=spec.dtype)
        for block in self._blocks[name]:
            ends = [o + n for o, n in zip(block.offset, block.shape)]
            common = [(max(a, o), min(b, e)) for (a, b), o, e in zip(region, block.offset, ends)]
            if all(a < b for a, b in common):
                values = block.read([slice(a - o, b - o) for (a, b), o in zip(common, block.offset)])
                result[tuple(slice(a - r, b - r) for (a, b), (r, _) in zip(common, region))] = values
        return result


def coverage_error(shape: Sequence[int], blocks: Sequence[Block]) -> str | None:
    """The reason why blocks do not cover a tensor exactly (one is missing, outside, or two overlap); None when they
    do."""
    for block in blocks:
        fits = len(block.offset) == len(block.shape) == len(shape)
        if not fits or any(o < 0 or n < 0 or o + n > size for o, n, size in zip(block.offset, block.shape, shape)):
            return f"{block} does not lie in it"
    blocks = [block for block in blocks if math.prod(block.shape)]
    if len(blocks) > _MAX_BLOCKS:
        return f"it is in {len(blocks):,} blocks; at most {_MAX_BLOCKS:,} are read"
    if blocks and shape:
        starts = np.array([block.offset for block in blocks])
        ends = starts + np.array([block.shape for block in blocks])
        for i in range(len(blocks) - 1):
            common = ((starts[i] < ends[i + 1 :]) & (starts[i + 1 :] < ends[i])).all(axis=1)
            if common.any():
                return f"{blocks[i]} and {blocks[i + 1 + int(common.argmax())]} overlap"
    elif len(blocks) > 1:
        return f"{blocks[0]} and {blocks[1]} overlap"
    covered = sum(math.prod(block.shape) for block in blocks)
    expected = math.prod(shape)
    if covered == expected:
        return None
    # no overlap, but too few elements: some cell of the grid of all edges is in no block
    intervals = []
    for d, size in enumerate(shape):
        starts_and_ends = {0, size}
        for block in blocks:
            starts_and_ends |= {block.offset[d], block.offset[d] + block.shape[d]}
        intervals.append(list(itertools.pairwise(sorted(starts_and_ends))))
    for cell in itertools.islice(itertools.product(*intervals), _MAX_GAP_CHECKS // max(len(blocks), 1)):
        if not any(_contains(block, cell) for block in blocks):
            return f"{_region([a for a, _ in cell], [b - a for a, b in cell])} is in no file"
    return f"{expected - covered:,} of its elements are in no file"


def _contains(block: Block, cell: Sequence[tuple[int, int]]) -> bool:
    return all(o <= a < o + n for (a, _), o, n in zip(cell, block.offset, block.shape))


def _region(offset: Sequence[int], shape: Sequence[int]) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(offset, shape))}]"


def _all(shape: Sequence[int]) -> list[slice]:
    return [slice(0, size) for size in shape]
