"""Matrices in blocks of 4 or 8 bits: the levels, codes and scales of bitsandbytes, and how far values move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.models.block_quant import ABSMAX, CODES, LEVELS, PARTS, BlockFormat
from llmsuite.models.scale_quant import dequantise_scales

DTYPES = ("nf4", "fp4", "int8")
# `bitsandbytes.functional.quantize_4bit(torch.linspace(-1.5, 1.5, 64)[None], blocksize=64, quant_type=...)`, 0.50.2
BYTES = {
    "nf4": "00000111111112222233344445556667788899aaabbbccccddddeeeeeeefffff",
    "fp4": "bbbbbbaaaaaaaadddddccccffeeee99911166667744445555522222222333333",
}
# appendix E of arXiv 2305.14314; and `quant_state.code` of bitsandbytes
PUBLISHED = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0),
        *(-0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
    ),
}


@st.composite
def matrices(draw: st.DrawFn) -> tuple[BlockFormat, np.ndarray]:
    """A format, and a matrix of whole blocks of very different magnitudes."""
    format = BlockFormat(draw(st.sampled_from(DTYPES)), draw(st.sampled_from([2, 6, 16, 64])))
    num_blocks = draw(st.integers(1, 4))
    num_outputs = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    magnitudes = 10.0 ** rng.integers(-6, 6, [num_blocks, 1, num_outputs])
    magnitudes[rng.random(magnitudes.shape) < 0.1] = 0
    values = rng.normal(size=[num_blocks, format.block, num_outputs]) * magnitudes
    return format, values.reshape(-1, num_outputs).astype("float32")


@pytest.mark.parametrize("dtype", BYTES)
def test_levels_codes_and_scales_are_those_of_bitsandbytes(dtype: str) -> None:
    np.testing.assert_array_equal(np.array(LEVELS[dtype], "float32"), np.array(PUBLISHED[dtype], "float32"))
    block = np.linspace(-1.5, 1.5, 64, dtype="float32")
    codes, absmax = BlockFormat(dtype, 64).quantise(np.stack([block, 2 * block], 1))
    assert codes.shape == (32, 2)
    assert [codes[:, output].tobytes().hex() for output in range(2)] == [BYTES[dtype]] * 2
    assert absmax.tolist() == [[1.5, 3.0]]


@given(matrices())
def test_a_value_moves_by_at_most_half_a_step(given: tuple[BlockFormat, np.ndarray]) -> None:
    format, values = given
    codes, absmax = format.quantise(values)
    assert {CODES: codes.shape, ABSMAX: absmax.shape} == format.shapes(values.shape)
    assert codes.dtype == format.stored_dtype
    levels = np.sort(LEVELS.get(format.dtype, np.arange(-127, 128) / 127))
    largest = np.repeat(absmax, format.block, 0)
    moved = np.abs(format.dequantise(codes, absmax) - values)
    assert (moved <= (np.diff(levels).max() / 2 + 1e-6) * largest).all()
    # to the nearest level: no other one is nearer
    nearest = np.abs(levels[:, None, None] * largest - values).min(0)
    np.testing.assert_allclose(moved, nearest, rtol=1e-4, atol=1e-6 * largest.max())


@given(matrices())
def test_what_was_stored_is_stored_as_it_is(given: tuple[BlockFormat, np.ndarray]) -> None:
    """So a base that is written out and read again is the same: merging loses nothing."""
    format, values = given
    once = format.rounded(values)
    np.testing.assert_allclose(format.rounded(once), once, rtol=1e-6)


@given(matrices())
def test_quantised_scales_move_values_by_as_much_as_the_scales(given: tuple[BlockFormat, np.ndarray]) -> None:
    format, values = given
    if format.dtype == "int8":
        return
    doubled = dataclasses.replace(format, double_quant=True)
    codes, _ = format.quantise(values)
    parts = doubled.parts(values)
    assert {part: (stored.shape, str(stored.dtype)) for part, stored in parts.items()} == {
        part: (shape, doubled.dtypes[part]) for part, shape in doubled.shapes(values.shape).items()
    }
    np.testing.assert_array_equal(parts[CODES], codes)
    scales = dequantise_scales(*(parts[part] for part in PARTS[1:]))
    expected = format.dequantise(codes, scales)
    np.testing.assert_array_equal(doubled.rounded(values), expected)
    stack = np.stack([values, 2 * values])
    np.testing.assert_array_equal(doubled.rounded(stack), [doubled.rounded(matrix) for matrix in stack])
    assert BlockFormat.from_json(doubled.to_json()) == doubled
    assert BlockFormat.from_json(format.to_json()) == format


@given(matrices(), st.data())
def test_a_slice_of_whole_blocks_is_that_of_the_whole(
    given: tuple[BlockFormat, np.ndarray], data: st.DataObject
) -> None:
    """A rank reads its shard of a matrix, and quantises only that."""
    format, values = given
    num_blocks = len(values) // format.block
    num_outputs = values.shape[1]
    start = data.draw(st.integers(0, num_blocks - 1)), data.draw(st.integers(0, num_outputs - 1))
    stop = data.draw(st.integers(start[0] + 1, num_blocks)), data.draw(st.integers(start[1] + 1, num_outputs))
    for part, whole in zip((CODES, ABSMAX), format.quantise(values)):
        rows = len(whole) // num_blocks
        index = [slice(start[0] * rows, stop[0] * rows), slice(start[1], stop[1])]
        own = values[tuple(format.in_matrix(part, index))]
        found = dict(zip((CODES, ABSMAX), format.quantise(own)))[part]
        np.testing.assert_array_equal(found, whole[tuple(index)])
