"""Double quantisation: codes, scales and offset of bitsandbytes, and slices of them as tensor parallel cuts them."""

from __future__ import annotations

import hashlib

import numpy as np
import paddle
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.models.dynamic_map import dynamic_map
from llmsuite.models.quantised import dequantise_scale_codes, dequantise_scales_on_device
from llmsuite.models.scale_quant import dequantise_scales, num_scale_blocks, quantise_scales

ROWS = 9
OUTPUTS = 60


def _scales() -> np.ndarray:
    numbers = np.arange(ROWS * OUTPUTS).reshape(ROWS, OUTPUTS)
    return ((1 + numbers * 7919 % 997) / 256).astype("float32")


def test_codes_and_scales_are_those_of_bitsandbytes() -> None:
    """Recorded from `flat - flat.mean()` in `quantize_blockwise(..., blocksize=256)` of the transposed scales, and from
    what `dequantize_blockwise` returns, 0.50.2 (backend `default`)."""
    codes, nested_absmax, nested_offset = quantise_scales(_scales())
    assert nested_offset.tolist() == [1.978790521621704]
    assert nested_absmax.tolist() == [1.974884271621704, 1.916290521621704, 1.896759271621704]
    by_output = np.ascontiguousarray(codes.T)
    assert by_output.tobytes()[:24].hex() == "00c013d427e73afbbef49f0bcc1fdf32f35eec4003c417d7"
    sha256 = "7f365a12ccfa2b3c8767602d1f6614b21b2e8e48696dabbd1de39affa2017b8f"
    assert hashlib.sha256(by_output.tobytes()).hexdigest() == sha256
    found = dequantise_scales(codes, nested_absmax, nested_offset)
    sha256 = "e0162927305af1d50472cbf59ad87e3eefad44b0df11bb84cbae163ae0bd0102"
    assert hashlib.sha256(np.ascontiguousarray(found.T).tobytes()).hexdigest() == sha256
    half_a_step = np.diff(dynamic_map(True)).max() / 2
    assert np.abs(found - _scales()).max() <= half_a_step * nested_absmax.max() + 1e-6


def test_equal_scales_stay_as_they_are() -> None:
    same = np.full([3, 5], 0.3, "float32")
    np.testing.assert_array_equal(dequantise_scales(*quantise_scales(same)), same)


@given(st.integers(1, 12), st.integers(1, 90), st.data())
def test_a_slice_is_that_of_the_full_scales(rows: int, outputs: int, data: st.DataObject) -> None:
    """Also by Paddle's operations."""
    rng = np.random.default_rng(rows * 100 + outputs)
    codes, *of_blocks = quantise_scales(rng.exponential(size=[rows, outputs]).astype("float32"))
    assert len(of_blocks[0]) == num_scale_blocks(rows * outputs)
    full = dequantise_scales(codes, *of_blocks)
    first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, outputs - 1))
    last = data.draw(st.integers(first[0] + 1, rows)), data.draw(st.integers(first[1] + 1, outputs))
    part = tuple(map(slice, first, last))
    own = np.ascontiguousarray(codes[part])
    np.testing.assert_array_equal(dequantise_scales(own, *of_blocks, rows, first), full[part])
    tensors = [paddle.to_tensor(values) for values in (own, *of_blocks)]
    for function in (dequantise_scale_codes, dequantise_scales_on_device):
        np.testing.assert_array_equal(function(*tensors, rows, first).numpy(), full[part])
