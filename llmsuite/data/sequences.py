"""Sequences of samples that are made of others when they are asked for, and know how long each is without making it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

S = TypeVar("S")
Measure = Callable[[Sequence[Any]], "np.ndarray | None"]
"""See `Stage.row_lengths`."""


class Lazy(Sequence[S]):
    """Base of such sequences. A part of one is a view of it."""

    @abc.abstractmethod
    def make(self, number: int) -> S:
        """The sample of a number from 0 on."""

    @abc.abstractmethod
    def lengths(self, measure: Measure) -> np.ndarray | None:
        """What `measure` gives for the whole sequence."""

    @overload
    def __getitem__(self, at: int) -> S: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[S]: ...
    def __getitem__(self, at: int | slice) -> S | Sequence[S]:
        if isinstance(at, slice):
            return Picked(self, np.arange(*at.indices(len(self))))
        return self.make(range(len(self))[at])


def lengths_of(samples: Sequence[Any], measure: Measure) -> np.ndarray | None:
    """What `measure` gives for samples. It is asked for those only whose lengths are not known."""
    return samples.lengths(measure) if isinstance(samples, Lazy) else measure(samples)


class Picked(Lazy[S]):
    """Some of the samples, in another order."""

    def __init__(self, samples: Sequence[S], numbers: np.ndarray):
        self._samples, self._numbers = samples, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def make(self, number: int) -> S:
        return self._samples[int(self._numbers[number])]

    def lengths(self, measure: Measure) -> np.ndarray | None:
        found = lengths_of(self._samples, measure)
        return None if found is None else found[self._numbers]


class Packs(Lazy[S]):
    """Samples that are joined to larger ones."""

    def __init__(
        self, samples: Sequence[Any], packs: Sequence[Sequence[int] | np.ndarray], join: Callable[[Sequence[Any]], S]
    ):
        """
        Args:
            samples: to pack.
            packs: numbers of the samples in each.
            join: makes one sample of several.
        """
        self._samples, self._packs, self._join = samples, packs, join

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def most(self) -> int:
        """Samples of the largest pack."""
        return max(map(len, self._packs), default=0)

    def make(self, number: int) -> S:
        return self._join([self._samples[int(i)] for i in self._packs[number]])

    def lengths(self, measure: Measure) -> np.ndarray | None:
        of_each = lengths_of(self._samples, measure)
        if of_each is None:
            return None
        found = np.empty([len(self), of_each.shape[1]], "int64")
        for number, pack in enumerate(self._packs):
            found[number] = of_each[pack].sum(0)
        return found
