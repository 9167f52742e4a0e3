"""Samples of several files in proportion to their weights."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.resources import find
from llmsuite.base.safe_files import exists, is_file
from llmsuite.data.lazy_sequences import LazySequence, LengthFunction, lengths_of
from llmsuite.data.remote import fetch, is_remote

S = TypeVar("S")


class Mixture(LazySequence[S]):
    """Samples of several files in proportion to their weights.

    One epoch has every sample of every file: once for the file with the most samples for its weight and for those
    without a weight, once or more for the others.
    """

    def __init__(self, parts: Sequence[Sequence[S]], weights: Sequence[float | None]):
        """
        Args:
            parts: samples of each file, at least one.
            weights: of each file; at least one is a number.
        """
        self._parts = parts
        scale = max(len(part) / weight for part, weight in zip(parts, weights) if weight is not None)
        # without 1e-6 a division that rounds up could add a sample to the part that sets the scale
        counts = [max(len(part), math.ceil(scale * (weight or 0.0) - 1e-6)) for part, weight in zip(parts, weights)]
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def make(self, number: int) -> S:
        part = bisect.bisect_right(self._ends, number)
        first = self._ends[part - 1] if part else 0
        return self._parts[part][(number - first) % len(self._parts[part])]

    def lengths(self, measure: LengthFunction) -> np.ndarray | None:
        maybe_lengths = [lengths_of(part, measure) for part in self._parts]
        part_lengths = [lengths for lengths in maybe_lengths if lengths is not None]
        if len(part_lengths) < len(maybe_lengths):
            return None
        counts = np.diff([0, *self._ends])
        return np.concatenate([lengths[np.arange(n) % len(lengths)] for lengths, n in zip(part_lengths, counts)])


def find_mixture_file(name: str, key: str, report: Callable[[str], None]) -> Path:
    """Return a file or directory that a mixture names, fetched if it is remote; for a corpus, its index.

    Args:
        name: from the recipe.
        key: recipe key of the mixture, for messages.
        report: receives messages about a fetch.

    Raises:
        UserError: there is none.
    """
    if is_remote(name):
        return fetch(name, report)
    path = find(name)
    if exists(path):
        return path
    index = find(f"{name}.idx")
    if is_file(index):
        return index
    raise UserError(f"{key}: {name} is not a file (working directory: {Path.cwd()})")
