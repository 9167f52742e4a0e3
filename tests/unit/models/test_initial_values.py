"""Initial values are a function of seed, name and index: whatever slice of a parameter is made, it is the same."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.models import initial_values as init
from llmsuite.models.initial_values import initial_values

NAME = "model.layers.0.mlp.up_proj.weight"
LITERAL = [
    [-0.79152715, -0.3837297, 0.008960642, -0.28124058, -1.0439373],
    [0.9297896, -0.8604346, 0.77102417, -1.4436904, -0.033319004],
]
FAR_LITERAL = [
    [-2.5765395, -0.50098586, -0.091026485],
    [-0.42947376, -0.50930506, 0.5863986],
]


@st.composite
def shapes_and_slices(draw: st.DrawFn, max_size: int = 9) -> tuple[list[int], list[slice]]:
    shape = draw(st.lists(st.integers(1, max_size), min_size=1, max_size=3))
    bounds = [st.none() | st.integers(-n - 1, n + 1) for n in shape]
    return shape, [slice(draw(bound), draw(bound)) for bound in bounds]


@settings(max_examples=300)
@given(shapes_and_slices(), st.sampled_from([1, 2, 3, 7, 1 << 20]))
def test_a_slice_equals_the_slice_of_the_full_parameter(case: tuple[list[int], list[slice]], chunk: int) -> None:
    shape, index = case
    whole = initial_values(7, NAME, shape, 0.02)
    with mock.patch.object(init, "_CHUNK", chunk):
        part = initial_values(7, NAME, shape, 0.02, index)
    assert whole.dtype == part.dtype == np.float32
    assert np.array_equal(part, whole[tuple(index)])


@settings(max_examples=100)
@given(st.integers(0, 600), st.integers(0, 600))
def test_a_range_is_the_same_wherever_vector_instructions_begin(start: int, stop: int) -> None:
    whole = initial_values(7, NAME, [600], 1.0)
    assert np.array_equal(initial_values(7, NAME, [600], 1.0, [slice(start, stop)]), whole[start:stop])


@settings(max_examples=50)
@given(st.integers(0, (1 << 21) - 3), st.integers(0, (1 << 18) - 40))
def test_positions_beyond_32_bits(row: int, column: int) -> None:
    rows = 1 << 21
    columns = 1 << 18
    part = initial_values(7, NAME, [rows, columns], 1.0, [slice(row, row + 3), slice(column, column + 40)])
    for i in range(3):
        start = (row + i) * columns + column
        flat = initial_values(7, NAME, [rows * columns], 1.0, [slice(start, start + 40)])
        assert np.array_equal(part[i], flat)


@settings(max_examples=50)
@given(st.tuples(st.integers(0, 1 << 40), st.text(max_size=8)), st.tuples(st.integers(0, 1 << 40), st.text(max_size=8)))
def test_only_the_same_seed_and_name_give_the_same_values(one: tuple[int, str], two: tuple[int, str]) -> None:
    same = np.array_equal(initial_values(*one, [8], 1.0), initial_values(*two, [8], 1.0))
    assert same == (one == two)


def test_neighbouring_seeds_and_names_are_unrelated() -> None:
    keys = [(seed, f"model.layers.{layer}.mlp.up_proj.weight") for seed in (0, 1, 11) for layer in (0, 1, 10)]
    values = np.stack([initial_values(seed, name, [10_000], 1.0) for seed, name in keys])
    correlation = np.corrcoef(values) - np.eye(len(keys))
    assert np.abs(correlation).max() < 0.05


def test_the_distribution_is_normal() -> None:
    count = 1_000_000
    std = 0.02
    values = initial_values(42, NAME, [1000, 1000], std).astype("float64").reshape(-1)
    # five standard errors each
    assert abs(values.mean()) < 5 * std / count**0.5
    assert values.std() == pytest.approx(std, rel=5 / (2 * count) ** 0.5)
    scaled = values / std
    assert np.mean(scaled**4) == pytest.approx(3, abs=5 * (96 / count) ** 0.5)
    assert np.mean(np.abs(scaled) > 2) == pytest.approx(0.0455, abs=5 * (0.0455 / count) ** 0.5)
    # the two halves of a Box-Muller pair are independent, and so are neighbouring pairs
    assert abs(np.mean(scaled[:-1] * scaled[1:])) < 5 / count**0.5


def test_the_values_never_change() -> None:
    """Every run without weights starts from them, so another value here would change every such run.

    Compared to a relative 1e-6: on a processor without AVX2, NumPy rounds the last bit of its float32 cosine and
    logarithm differently.
    """
    expected = np.array(LITERAL, dtype="float32")
    np.testing.assert_allclose(initial_values(42, NAME, [2, 5], 1.0), expected, rtol=1e-6)
    scaled = initial_values(42, NAME, [2, 5], 0.02)
    np.testing.assert_allclose(scaled, expected * np.float32(0.02), rtol=1e-6)
    far = [slice(123_456_789, 123_456_791), slice(1000, 1003)]
    found = initial_values(0, "lm_head.weight", [200_000_000, 4096], 1.0, far)
    np.testing.assert_allclose(found, np.array(FAR_LITERAL, dtype="float32"), rtol=1e-6)
