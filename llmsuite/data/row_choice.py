"""Choice of rows: a random sub-sample, and rows that are held out for evaluation.

Both are the choices of NumPy's permutations, so that the same rows can be had elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmsuite.base.errors import UserError


def sampled_rows(num_rows: int, count: int, seed: int) -> np.ndarray:
    """Return the numbers of `count` random rows: the first of `numpy.random.RandomState(seed).permutation(num_rows)`,
    as `#COUNT` of a data set of ms-swift. NumPy guarantees that this stream never changes.

    Raises:
        UserError: there are fewer rows.
    """
    if count > num_rows:
        raise UserError(
            f"data.sample: is {count}, and data.train has {num_rows} rows; lower it, or remove it to use all rows"
        )
    return np.random.RandomState(seed).permutation(num_rows)[:count]


def held_out_rows(num_rows: int, holdout: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the rows for training, and of those that are held out, each in the order of
    `datasets.Dataset.train_test_split(test_size=holdout, seed=seed)`.

    Args:
        num_rows: number of all rows.
        holdout: share of the rows, rounded up; an integer is a number of rows.
        seed: of the permutation.

    Raises:
        UserError: no row would be left for training.
    """
    count = holdout if isinstance(holdout, int) else math.ceil(holdout * num_rows)
    if count >= num_rows:
        raise UserError(f"data.holdout: is {holdout}, which leaves none of the {num_rows} rows for training; lower it")
    permutation = np.random.default_rng(seed).permutation(num_rows)
    return permutation[count:], permutation[:count]


def rows_of_files(numbers: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Split numbers of rows by file, where the rows of several files are numbered one after the other.

    Args:
        numbers: of rows, in any order, which is kept within each file.
        sizes: number of rows of each file.

    Returns:
        For each file, numbers of its own rows.
    """
    ends = np.cumsum(sizes)
    files = np.searchsorted(ends, numbers, side="right")
    return [numbers[files == at] - (end - size) for at, (end, size) in enumerate(zip(ends, sizes))]
