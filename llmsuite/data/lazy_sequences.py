"""Lazy sequences of samples: a sample is made on access, and its length is known without making it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

S = TypeVar("S")
LengthFunction = Callable[[Sequence[Any]], "np.ndarray | None"]
"""Returns the lengths of samples, [samples, rows of each], or None; see `Stage.row_lengths`."""


class LazySequence(Sequence[S]):
    """Base of lazy sequences. A slice of one is a view of it."""

    @abc.abstractmethod
    def make(self, number: int) -> S:
        """Make the sample of a number, from 0 on."""

    @abc.abstractmethod
    def lengths(self, measure: LengthFunction) -> np.ndarray | None:
        """Return the result of `measure` for the full sequence."""

    @overload
    def __getitem__(self, at: int) -> S: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[S]: ...
    def __getitem__(self, at: int | slice) -> S | Sequence[S]:
        if isinstance(at, slice):
            return Subset(self, np.arange(*at.indices(len(self))))
        return self.make(range(len(self))[at])


def lengths_of(samples: Sequence[Any], measure: LengthFunction) -> np.ndarray | None:
    """Return the lengths of samples. `measure` is called only for samples whose lengths are not known."""
    if isinstance(samples, LazySequence):
        return samples.lengths(measure)
    return measure(samples)


class Subset(LazySequence[S]):
    """Some of the samples, in another order."""

    def __init__(self, samples: Sequence[S], numbers: np.ndarray):
        self._samples = samples
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def make(self, number: int) -> S:
        return self._samples[int(self._numbers[number])]

    def lengths(self, measure: LengthFunction) -> np.ndarray | None:
        found = lengths_of(self._samples, measure)
        if found is None:
            return None
        return found[self._numbers]


class PackedSamples(LazySequence[S]):
    """Samples that are joined into packs."""

    def __init__(
        self, samples: Sequence[Any], packs: Sequence[Sequence[int] | np.ndarray], join: Callable[[Sequence[Any]], S]
    ):
        """
        Args:
            samples: to pack.
            packs: numbers of the samples in each.
            join: makes one sample of several.
        """
        self._samples = samples
        self._packs = packs
        self._join = join

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def max_pack_size(self) -> int:
        """Number of samples in the largest pack."""
        return max(map(len, self._packs), default=0)

    def make(self, number: int) -> S:
        return self._join([self._samples[int(i)] for i in self._packs[number]])

    def lengths(self, measure: LengthFunction) -> np.ndarray | None:
        of_each = lengths_of(self._samples, measure)
        if of_each is None:
            return None
        found = np.empty([len(self), of_each.shape[1]], "int64")
        for number, pack in enumerate(self._packs):
            found[number] = of_each[pack].sum(0)
        return found
