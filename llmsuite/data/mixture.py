"""Samples of several files in proportion to their weights."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmsuite.data.remote import fetch, is_remote
from llmsuite.data.sequences import Lazy, Measure, lengths_of
from llmsuite.errors import UserError
from llmsuite.regular import exists, is_file
from llmsuite.resources import find

S = TypeVar("S")


class Mixture(Lazy[S]):
    """Samples of several files in proportion to their weights.

    One pass has every sample of every file: once for the file that takes longest and for those without a weight, once
    or more for the others.
    """

    def __init__(self, parts: Sequence[Sequence[S]], weights: Sequence[float | None]):
        """Every part has at least one sample; one weight at least is a number."""
        self._parts = parts
        scale = max(len(part) / weight for part, weight in zip(parts, weights) if weight is not None)
        # the small difference keeps the part that sets the scale at its own length, however the division rounds
        counts = [max(len(part), math.ceil(scale * (weight or 0.0) - 1e-6)) for part, weight in zip(parts, weights)]
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def make(self, number: int) -> S:
        part = bisect.bisect_right(self._ends, number)
        first = self._ends[part - 1] if part else 0
        return self._parts[part][(number - first) % len(self._parts[part])]

    def lengths(self, measure: Measure) -> np.ndarray | None:
        found = [lengths_of(part, measure) for part in self._parts]
        known = [lengths for lengths in found if lengths is not None]
        if len(known) < len(found):
            return None
        counts = np.diff([0, *self._ends])
        return np.concatenate([lengths[np.arange(n) % len(lengths)] for lengths, n in zip(known, counts)])


def mixed_file(name: str, key: str, report: Callable[[str], None]) -> Path:
    """A file or directory that a mixture names, fetched if it is elsewhere; of a corpus the index.

    Raises UserError with the recipe key of the mixture when there is none.
    """
    if is_remote(name):
        return fetch(name, report)
    path = find(name)
    if not exists(path) and is_file(index := find(f"{name}.idx")):
        return index
    if not exists(path):
        raise UserError(f"{key}: {name} is not a file (working directory: {Path.cwd()})")
    return path
