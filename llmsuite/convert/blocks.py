"""Tensors that are stored in blocks, one or more by each rank of a run, read as whole tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.errors import UserError

Index = Sequence[slice]
_MOST_BLOCKS = 1 << 14
"""Blocks of a tensor: each is compared with each. A rank has one of it."""
_MOST_LOOKED_AT = 1 << 20
"""Pairs of a block and of a place where a gap may be, before its place is left out of the message."""


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
        """`where` names the source in messages."""
        self.where, self._paths, self._specs = where, sorted(paths), dict(specs)
        self._blocks: dict[str, list[Block]] = {name: [] for name in specs}

    def add(self, name: str, blocks: Sequence[Block]) -> None:
        """Add the blocks of a tensor. Raises UserError unless they cover each element exactly once."""
        if problem := cover_problem(self._specs[name].shape, blocks):
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
        """As `TensorFiles.read`; opens only the blocks it needs."""
        spec = self._specs[name]
        wanted = [
            (s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index or _all(spec.shape), spec.shape)
        ]
        result = np.empty([stop - start for start, stop in wanted], dtype=spec.dtype)
        for block in self._blocks[name]:
            ends = [o + n for o, n in zip(block.offset, block.shape)]
            common = [(max(a, o), min(b, e)) for (a, b), o, e in zip(wanted, block.offset, ends)]
            if all(a < b for a, b in common):
                part = block.read([slice(a - o, b - o) for (a, b), o in zip(common, block.offset)])
                result[tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(common, wanted))] = part
        return result


def cover_problem(shape: Sequence[int], blocks: Sequence[Block]) -> str | None:
    """Why blocks do not cover a tensor exactly: one is missing, outside, or two overlap. None when they do."""
    for block in blocks:
        fits = len(block.offset) == len(block.shape) == len(shape)
        if not fits or any(o < 0 or n < 0 or o + n > size for o, n, size in zip(block.offset, block.shape, shape)):
            return f"{block} does not lie in it"
    blocks = [block for block in blocks if math.prod(block.shape)]
    if len(blocks) > _MOST_BLOCKS:
        return f"it is in {len(blocks):,} blocks; at most {_MOST_BLOCKS:,} are read"
    if blocks and shape:
        starts = np.array([block.offset for block in blocks])
        ends = starts + np.array([block.shape for block in blocks])
        for i in range(len(blocks) - 1):
            common = ((starts[i] < ends[i + 1 :]) & (starts[i + 1 :] < ends[i])).all(axis=1)
            if common.any():
                return f"{blocks[i]} and {blocks[i + 1 + int(common.argmax())]} overlap"
    elif len(blocks) > 1:
        return f"{blocks[0]} and {blocks[1]} overlap"
    there, wanted = sum(math.prod(block.shape) for block in blocks), math.prod(shape)
    if there == wanted:
        return None
    # no overlap, but too few elements: some cell of the grid of all edges is in no block
    edges = [
        sorted({0, size, *(b.offset[d] for b in blocks), *(b.offset[d] + b.shape[d] for b in blocks)})
        for d, size in enumerate(shape)
    ]
    cells = itertools.product(*(list(itertools.pairwise(e)) for e in edges))
    for cell in itertools.islice(cells, _MOST_LOOKED_AT // max(len(blocks), 1)):
        inside = (all(o <= a < o + n for (a, _), o, n in zip(cell, b.offset, b.shape)) for b in blocks)
        if not any(inside):
            return f"{_region([a for a, _ in cell], [b - a for a, b in cell])} is in no file"
    return f"{wanted - there:,} of its elements are in no file"


def _region(offset: Sequence[int], shape: Sequence[int]) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(offset, shape))}]"


def _all(shape: Sequence[int]) -> list[slice]:
    return [slice(0, size) for size in shape]
