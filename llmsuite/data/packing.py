"""Packing of samples of different lengths into sequences with little unused space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from llmsuite.data.lazy_sequences import LengthFunction, PackedSamples, lengths_of

S = TypeVar("S")
_CHUNK = 1 << 16


def pack_samples(
    samples: Sequence[Any],
    measure: LengthFunction,
    capacity: int,
    join: Callable[[Sequence[Any]], S],
    first_fit_order: np.random.Generator | None = None,
) -> tuple[PackedSamples[S], float]:
    """Join samples by `best_fit` or `first_fit`, so that no row of a pack takes more than `capacity` positions.

    Args:
        samples: to pack; each fits.
        measure: returns the positions that the rows of each sample take, [samples, rows of each].
        capacity: positions of a row.
        join: makes one sample of several.
        first_fit_order: shuffles the samples for `first_fit`, which counts the last token of each too, that is only a
            target; None for `best_fit`.

    Returns:
        The packs, and the used part of their rows, from 0 to 1.
    """
    lengths = lengths_of(samples, measure)
    assert lengths is not None
    groups: Sequence[np.ndarray] = best_fit(lengths.max(1), capacity)
    if first_fit_order is not None:
        order = first_fit_order.permutation(len(lengths))
        groups = [order[pack] for pack in first_fit(np.minimum(lengths.max(1)[order] + 1, capacity), capacity)]
    packs = PackedSamples(samples, groups, join)
    return packs, float(lengths.sum() / (lengths.shape[1] * len(packs) * capacity))


_GROUP = 100_000
_MOST_SAMPLES = 200


def first_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[np.ndarray]:
    """Put every sample into a pack in their order, each into the first one with room, as `pack_group` of Axolotl's
    multipack sampler: a pack has at most 200 samples, all of the same 100,000.

    Args:
        lengths: of the samples, from 1 to `capacity`.
        capacity: of a pack.

    Returns:
        Numbers of the samples of each pack, in the order in which the packs were opened.
    """
    sizes = np.asarray(lengths, dtype="int64")
    assert not len(sizes) or 0 < sizes.min() <= sizes.max() <= capacity, (lengths, capacity)
    packs: list[list[int]] = []
    for begin in range(0, len(sizes), _GROUP):
        opened = len(packs)
        room = np.zeros(min(_GROUP, len(sizes) - begin), "int64")
        for sample in range(begin, min(begin + _GROUP, len(sizes))):
            size = int(sizes[sample])
            fits = room[: len(packs) - opened] >= size
            at = int(fits.argmax()) if len(fits) else 0
            if not len(fits) or not fits[at]:
                at = len(fits)
                packs.append([])
                room[at] = capacity
            packs[opened + at].append(sample)
            room[at] -= size
            if len(packs[opened + at]) == _MOST_SAMPLES:
                room[at] = 0
    return [np.array(pack) for pack in packs]


class Groups(Sequence[np.ndarray]):
    """Groups of the numbers from 0 on, in ascending order within a group."""

    def __init__(self, group_of: np.ndarray):
        """`group_of`: [numbers], the group of each number. Groups are counted from 0, and none is empty."""
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
        start = self._ends[number - 1] if number else 0
        return self._numbers[start : self._ends[number]]


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
    order = np.argsort(-sizes, kind="stable")
    pack_of = np.empty_like(sizes)
    num_packs = 0
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Packs by their free space."""
    rooms = 0
    """Bit n is set if some pack has exactly n free: the least sufficient space is the lowest sufficient bit."""
    for first in range(0, len(order), _CHUNK):  # in chunks, as Python lists take five times the memory of arrays
        part = order[first : first + _CHUNK]
        for sample, length in zip(part.tolist(), sizes[part].tolist()):
            enough = rooms >> length
            if enough:
                room = length + (enough & -enough).bit_length() - 1
                pack = with_room[room].pop()
                if not with_room[room]:
                    rooms &= ~(1 << room)
            else:
                room = capacity
                pack = num_packs
                num_packs += 1
            pack_of[sample] = pack
            if room > length:
                with_room[room - length].append(pack)
                rooms |= 1 << (room - length)
    return Groups(pack_of)
