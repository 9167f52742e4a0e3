"""Packing of samples of different lengths into sequences with little unused space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put every sample into a pack: the longest first, each where it leaves the least space (best-fit decreasing,
    Johnson 1974: at most 11/9 of the fewest packs possible, plus 6/9).

    The result is a function of the arguments alone.

    Args:
        lengths: of the samples, from 1 to `capacity`.
        capacity: of a pack.

    Returns:
        Packs in the order in which they were opened, each with the indices of its samples in ascending order.
    """
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Packs by the space that is left in them."""
    rooms = 0
    """Bit n is set if some pack has exactly n left: the least sufficient space is the lowest sufficient bit."""
    for sample in np.argsort(-np.asarray(lengths, dtype="int64"), kind="stable").tolist():
        length = lengths[sample]
        assert 0 < length <= capacity, (length, capacity)
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(sample)
        if room > length:
            with_room[room - length].append(pack)
            rooms |= 1 << (room - length)
    return [sorted(pack) for pack in packs]
