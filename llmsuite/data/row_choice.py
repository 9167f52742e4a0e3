"""Choice of rows: a random sub-sample, and rows that are held out for evaluation.

These are the choices of NumPy's permutations, so that the same rows can be had elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmsuite.base.errors import UserError


def sampled_rows(num_rows: int, count: int, seed: int, name: str = "data.train") -> np.ndarray:
    """Return the numbers of `count` random rows: the first of `numpy.random.RandomState(seed).permutation(num_rows)`.
    NumPy guarantees that this stream never changes.

    Args:
        num_rows: number of all rows.
        count: number of rows to return.
        seed: of the permutation.
        name: of the file, for messages.

    Raises:
        UserError: there are fewer rows.
    """
    if count > num_rows:
        raise UserError(
            f"data.sample: is {count}, and {name} has {num_rows} rows; lower it, or remove it to use all rows"
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


def ms_swift_rows(
    sizes: Sequence[int], counts: Sequence[int | None], ratio: float | None, seed: int, names: Sequence[str]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Choose rows of several files as `load_dataset` of ms-swift does: one random stream goes through the files. A
    share of each file is held out; its other rows are sampled, and repeated where there are fewer.

    Args:
        sizes: number of rows of each file.
        counts: COUNT of each file, NAME#COUNT, of which the held-out rows are a part; None for its number of rows.
        ratio: `split_dataset_ratio`, rounded down but to at least one row; None to hold no row out.
        seed: `data_seed`.
        names: of the files, for messages.

    Returns:
        For each file, the numbers of its rows for training, and of those that are held out.

    Raises:
        UserError: no row of a file would be left for training.
    """
    stream = np.random.RandomState(seed)
    training = []
    held_out = []
    for size, given, name in zip(sizes, counts, names):
        count = size if given is None else given
        rows = np.arange(size)
        num_held_out = 0
        if ratio is not None:
            num_held_out = max(int(min(size, count) * ratio), 1)
            if num_held_out >= min(size, count):
                raise UserError(
                    f"data.holdout: holds out all {min(size, count)} rows of {name}; lower it, or remove the file"
                )
            rows = np.random.default_rng(stream.randint(0, np.iinfo(np.int32).max)).permutation(size)
        held_out.append(rows[:num_held_out])
        training.append(_as_many(rows[num_held_out:], count - num_held_out, stream))
    return training, held_out


def axolotl_rows(
    usable: Sequence[np.ndarray], sizes: Sequence[int], holdout: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Choose rows of several files as Axolotl does: the rows of all files are shuffled, those that are too long are
    dropped, and the last ones are held out.

    The order is that of `datasets.Dataset.shuffle(seed)`, of all rows one file after the other. It does not depend on
    which rows are dropped.

    Args:
        usable: for each file, the numbers of the rows that are not dropped.
        sizes: number of rows of each file.
        holdout: `val_set_size`: a share of the rows that are left, rounded up, or a number of rows.
        seed: of the order.

    Returns:
        For each file, the numbers of its rows for training, and of those that are held out.

    Raises:
        UserError: no row would be left for training.
    """
    is_usable = np.zeros(sum(sizes), bool)
    first = 0
    for numbers, size in zip(usable, sizes):
        is_usable[first + numbers] = True
        first += size
    order = np.random.default_rng(seed).permutation(len(is_usable))
    rows = order[is_usable[order]]
    count = holdout if isinstance(holdout, int) else math.ceil(holdout * len(rows))
    if count >= len(rows):
        raise UserError(
            f"data.holdout: is {holdout}, which leaves none of the {len(rows)} usable rows for training; lower it"
        )
    border = len(rows) - count
    return rows_of_files(rows[:border], sizes), rows_of_files(rows[border:], sizes)


def _as_many(rows: np.ndarray, count: int, stream: np.random.RandomState) -> np.ndarray:
    """Return `count` of the rows: all of them as often as possible, then some random ones."""
    times, rest = divmod(count, len(rows))
    parts = [rows] * times
    if rest:
        parts.append(rows[stream.permutation(len(rows))[:rest]])
    return np.concatenate(parts)


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
