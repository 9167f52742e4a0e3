"""Samples of equal length, cut from a corpus of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np


class TokenWindows(Sequence[np.ndarray]):
    """Consecutive windows of `length` tokens, each with the token that follows it.

    The windows are views into the corpus: nothing is read from disk before it is used.
    """

    def __init__(self, tokens: np.ndarray, length: int, numbers: range | None = None):
        """
        Args:
            tokens: [T], the corpus.
            length: tokens of a window.
            numbers: the windows to use; by default all complete ones.
        """
        # an ndarray view of a memmap: slices of a memmap itself take three times as long
        self._tokens = np.asarray(tokens)
        self._length = length
        self._numbers = range(max(0, len(tokens) - 1) // length) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, at: slice) -> TokenWindows: ...
    def __getitem__(self, at: int | slice) -> np.ndarray | TokenWindows:
        if isinstance(at, slice):
            return TokenWindows(self._tokens, self._length, self._numbers[at])
        start = self._numbers[at] * self._length
        return self._tokens[start : start + self._length + 1]

    def spread(self, count: int) -> TokenWindows:
        """At most `count` windows at equal distances."""
        return self[:: max(1, len(self) // count)][:count]


def split_bounds(num_documents: int, split: str) -> tuple[int, int]:
    """Return the numbers of the documents where evaluation begins and ends, for proportions such as "969,30,1"."""
    parts = [float(part) for part in split.split(",")]
    first = parts[0] / sum(parts)
    last = (parts[0] + parts[1]) / sum(parts)
    return round(num_documents * first), round(num_documents * last)
