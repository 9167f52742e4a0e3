"""The dynamic map of 8 bits is that of bitsandbytes, and a value is stored as the nearest of its values."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.models.dynamic_map import BLOCK, dynamic_map, quantise_blocks, thresholds

# sha256 of `bitsandbytes.functional.create_dynamic_map(signed=...)` in float32, 0.50.2 with torch 2.13
PUBLISHED = {
    True: "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    False: "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}


@pytest.mark.parametrize("signed", PUBLISHED)
def test_the_values_are_those_of_bitsandbytes(signed: bool) -> None:
    values = dynamic_map(signed)
    assert (values.shape, values.dtype) == ((256,), np.float32)
    assert hashlib.sha256(values.tobytes()).hexdigest() == PUBLISHED[signed]
    assert (np.diff(values) > 0).all()
    assert {0.0, 1.0} <= {*values.tolist()}
    assert (values.min() < 0) is np.bool_(signed)


@given(st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_a_code_is_that_of_the_nearest_value(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=size) * 10.0 ** rng.integers(-4, 4, size)).astype("float32")
    values[rng.random(size) < 0.1] = 0
    codes, absmax = quantise_blocks(values)
    assert codes.shape == values.shape
    blocks = [values[first : first + BLOCK] for first in range(0, size, BLOCK)]
    np.testing.assert_array_equal(absmax, [np.abs(block).max() for block in blocks])
    for number, block in enumerate(blocks):
        scaled = block / (absmax[number] or 1)
        own = dynamic_map(True)[codes[number * BLOCK :][: len(block)]]
        nearest = np.abs(scaled[:, None] - dynamic_map(True)).min(1)
        np.testing.assert_allclose(np.abs(own - scaled), nearest, rtol=1e-4, atol=1e-7)


def test_halves_round_down() -> None:
    middle = thresholds(True)[[5, 200]]
    codes, _ = quantise_blocks(np.array([1, *middle, *np.nextafter(middle, np.float32(2))], "float32"))
    assert codes.tolist() == [255, 5, 200, 6, 201]
