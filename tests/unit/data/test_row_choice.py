"""Rows that are held out or sampled are those that other libraries choose."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data.row_choice import axolotl_rows, held_out_rows, ms_swift_rows, rows_of_files, sampled_rows
from tests.support.swift import load_datasets


@pytest.mark.parametrize(
    ("num_rows", "holdout"),
    [(10, 0.1), (11, 0.1), (100, 0.25), (7, 3), (101, 1), (2, 1), (1000, 0.0009), (10, 0.3), (29, 0.7)],
)
@pytest.mark.parametrize("seed", [0, 42, 2**31])
def test_held_out_rows_are_those_of_train_test_split(num_rows: int, holdout: float, seed: int) -> None:
    split = datasets.Dataset.from_dict({"n": range(num_rows)}).train_test_split(test_size=holdout, seed=seed)
    train, held_out = held_out_rows(num_rows, holdout, seed)
    assert train.tolist() == split["train"]["n"][:]
    assert held_out.tolist() == split["test"]["n"][:]


def test_rows_of_several_files_are_those_of_concatenated_data_sets() -> None:
    sizes = [5, 1, 9]
    files = [datasets.Dataset.from_dict({"file": [at] * size, "n": range(size)}) for at, size in enumerate(sizes)]
    split = datasets.concatenate_datasets(files).train_test_split(test_size=0.3, seed=7)
    for numbers, name in zip(held_out_rows(sum(sizes), 0.3, 7), ("train", "test")):
        expected = [[row["n"] for row in split[name] if row["file"] == at] for at in range(len(sizes))]
        assert [found.tolist() for found in rows_of_files(numbers, sizes)] == expected


def test_the_permutations_stay() -> None:
    """A resumed run holds out the same rows with another version of NumPy."""
    assert held_out_rows(10, 4, 42)[1].tolist() == [5, 6, 0, 7]
    assert sampled_rows(10, 4, 42).tolist() == [8, 1, 5, 0]


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.data())
def test_each_row_is_in_one_part(num_rows: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, num_rows))
    sampled = sampled_rows(num_rows, count, seed)
    assert len(set(sampled.tolist())) == count
    if count < num_rows:
        train, held_out = held_out_rows(num_rows, count, seed)
        assert len(held_out) == count
        assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(num_rows))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.randoms())
def test_each_row_goes_to_its_file(sizes: list[int], random: object) -> None:
    numbers = np.random.RandomState(1).permutation(sum(sizes))
    parts = rows_of_files(numbers, sizes)
    begins = np.cumsum([0, *sizes])
    assert sorted(n + begins[at] for at, part in enumerate(parts) for n in part.tolist()) == list(range(sum(sizes)))
    assert all(0 <= n < size for part, size in zip(parts, sizes) for n in part.tolist())


NAMES = ("a", "b", "c", "d")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 60), st.none() | st.integers(2, 200)), min_size=1, max_size=4),
    st.none() | st.floats(0.0001, 0.49),
    st.integers(0, 2**32 - 1),
)
def test_rows_of_ms_swift(files: Sequence[tuple[int, int | None]], ratio: float | None, seed: int) -> None:
    sizes = [size for size, _ in files]
    counts = [count for _, count in files]
    found = ms_swift_rows(sizes, counts, ratio, seed, NAMES)
    expected = load_datasets(sizes, counts, ratio, seed)
    for ours, theirs in zip(found, expected):
        assert [rows.tolist() for rows in ours] == theirs


def test_the_streams_of_ms_swift_stay() -> None:
    """Computed once with ms-swift's `load_dataset`, at commit 3602360a; NumPy has changed none of it since."""
    training, held_out = ms_swift_rows([10, 6], [4, 9], 0.2, 42, NAMES)
    assert [rows.tolist() for rows in training] == [[4, 3, 2], [1, 4, 2, 5, 0, 5, 4, 1]]
    assert [rows.tolist() for rows in held_out] == [[8], [3]]


@pytest.mark.parametrize(
    ("sizes", "counts", "ratio", "message"),
    [
        ([5, 1], [None, None], 0.1, "holds out all 1 rows of b; lower it, or remove the file"),
        ([5], [1], 0.1, "holds out all 1 rows of a; lower it"),
    ],
)
def test_a_row_is_left_for_training(
    sizes: Sequence[int], counts: Sequence[int | None], ratio: float, message: str
) -> None:
    with pytest.raises(UserError, match=rf"data\.holdout: {message}"):
        ms_swift_rows(sizes, counts, ratio, 42, NAMES)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.holdout: is 3, which leaves none of the 3 rows for training; lower it"):
        held_out_rows(3, 3, 1)
    with pytest.raises(UserError, match=r"data\.holdout: is 0\.9, which leaves none of the 1 rows"):
        held_out_rows(1, 0.9, 1)
    with pytest.raises(UserError, match=r"data\.sample: is 4, and data\.train has 3 rows; lower it"):
        sampled_rows(3, 4, 1)


@pytest.mark.parametrize("holdout", [0.05, 0.1, 7])
def test_rows_of_axolotl(holdout: float) -> None:
    """Its `merge_datasets`, filter of lengths and `create_train_validation_split` (067b021c)."""
    lengths = np.random.default_rng(3).integers(1, 100, 90)
    files = datasets.Dataset.from_dict({"row": range(90), "length": lengths})
    kept = files.shuffle(seed=7).filter(lambda row: row["length"] <= 60)
    expected = kept.train_test_split(test_size=holdout, shuffle=False, seed=7)
    usable = [np.flatnonzero(lengths[:40] <= 60), np.flatnonzero(lengths[40:] <= 60)]
    train, held_out = axolotl_rows(usable, [40, 50], holdout, 7)
    for part, name in ((train, "train"), (held_out, "test")):
        rows = list(expected[name]["row"])
        assert part[0].tolist() == [row for row in rows if row < 40]
        assert part[1].tolist() == [row - 40 for row in rows if row >= 40]


def test_the_order_of_axolotl_stays() -> None:
    usable = [np.array([0, 1, 2, 4, 5, 6, 7, 9])]
    (train,), (held_out,) = axolotl_rows(usable, [10], 0.25, 42)
    assert (train.tolist(), held_out.tolist()) == ([5, 6, 0, 7, 2, 4], [9, 1])


def test_axolotl_leaves_a_row_for_training() -> None:
    with pytest.raises(UserError, match="leaves none of the 2 usable rows for training"):
        axolotl_rows([np.array([0, 3])], [4], 2, 42)
