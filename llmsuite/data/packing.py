"""Packing of samples of different lengths into sequences with little unused space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from llmsuite.data.sequences import Measure, Packs, lengths_of

S = TypeVar("S")
_AT_ONCE = 1 << 16


def packed(
    samples: Sequence[Any], measure: Measure, capacity: int, join: Callable[[Sequence[Any]], S]
) -> tuple[Packs[S], float]:
    """Samples joined so that none of the rows that a pack has in a batch takes more than `capacity` positions; and how
    full these rows are, from 0 to 1. See `best_fit`.

    Args:
        samples: to pack; each fits.
        measure: gives the positions that the rows of each take, [samples, rows of each].
        capacity: of a row.
        join: makes one sample of several.
    """
    lengths = lengths_of(samples, measure)
    assert lengths is not None
    packs = Packs(samples, best_fit(lengths.max(1), capacity), join)
    return packs, float(lengths.sum() / (lengths.shape[1] * len(packs) * capacity))


class Groups(Sequence[np.ndarray]):
    """The numbers from 0 on, each in one group: in ascending order within it."""

    def __init__(self, group_of: np.ndarray):
        """`group_of`: [numbers], the group of each; groups are counted from 0 and have at least one."""
        self._numbers = np.argsort(group_of, kind="stable")
        self._ends = np.cumsum(np.bincount(group_of)) if len(group_of) else group_of

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, at: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        return self._numbers[self._ends[number - 1] if number else 0 : self._ends[number]]


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> Groups:
    """Put every sample into a pack: the longest first, each where it leaves the least space (best-fit decreasing,
    Johnson 1974: at most 11/9 of the fewest packs possible, plus 6/9).

    The result is a function of the arguments alone.

    Args:
        lengths: of the samples, from 1 to `capacity`.
        capacity: of a pack.

    Returns:
        Packs in the order in which they were opened.
    """
    sizes = np.asarray(lengths, dtype="int64")
    assert not len(sizes) or 0 < sizes.min() <= sizes.max() <= capacity, (lengths, capacity)
    order, pack_of, num_packs = np.argsort(-sizes, kind="stable"), np.empty_like(sizes), 0
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Packs by the space that is left in them."""
    rooms = 0
    """Bit n is set if some pack has exactly n left: the least sufficient space is the lowest sufficient bit."""
    for first in range(0, len(order), _AT_ONCE):  # as lists of Python they take five times the memory
        part = order[first : first + _AT_ONCE]
        for sample, length in zip(part.tolist(), sizes[part].tolist()):
            enough = rooms >> length
            if enough:
                room = length + (enough & -enough).bit_length() - 1
                pack = with_room[room].pop()
                if not with_room[room]:
                    rooms &= ~(1 << room)
            else:
                room, pack = capacity, num_packs
                num_packs += 1
            pack_of[sample] = pack
            if room > length:
                with_room[room - length].append(pack)
                rooms |= 1 << (room - length)
    return Groups(pack_of)
