"""Products of LLM.int8: the codes, scales and rounding of bitsandbytes, exact sums of integers, and gradients of the
dequantised matrix."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.models import llm_int8
from llmsuite.models.block_quant import ABSMAX, CODES, BlockFormat
from llmsuite.models.quantised import LlmInt8Matrix, QuantisedLinear, dequantise_on_device, quantised_matrix
from tests.support.paths import ROOT

FORMAT = BlockFormat("llm_int8", 0)
CASES = json.loads((ROOT / "tests/reference/llm_int8.json").read_text(encoding="utf-8"))


def _tensor(values: Any, dtype: str) -> paddle.Tensor:
    return paddle.to_tensor(np.array(values, "float32")).astype(dtype)


def _matrix(weight: np.ndarray) -> LlmInt8Matrix:
    """The quantised form of a matrix [I, O], or of a stack of them."""
    matrix = quantised_matrix(weight.shape, FORMAT)
    assert isinstance(matrix, LlmInt8Matrix)
    parts = [FORMAT.quantise(one) for one in weight.reshape(-1, *weight.shape[-2:])]
    for part, values in zip((CODES, ABSMAX), zip(*parts)):
        stored = getattr(matrix, part)
        stored.set_value(np.stack(values).reshape(stored.shape))
    return matrix


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['dtype']},bias={case['bias'] is not None}")
def test_values_of_bitsandbytes(case: dict[str, Any]) -> None:
    """To one rounding of the output: the form for a CPU has another constant for 1 / 127**2 than the kernel."""
    dtype = case["dtype"]
    weight = np.array(case["weight"], "float32").T
    codes, absmax = FORMAT.quantise(weight)
    np.testing.assert_array_equal(codes.T, np.array(case["codes"]))
    np.testing.assert_array_equal(absmax[0], np.array(case["scales"], "float32"))
    x = _tensor(case["x"], dtype)
    bias = None if case["bias"] is None else _tensor(case["bias"], dtype)
    matrix = _matrix(weight)
    found = matrix.product(x, bias)
    assert found.dtype == x.dtype
    step = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    expected = np.array(case["output"])
    np.testing.assert_allclose(found.astype("float32").numpy(), expected, rtol=step, atol=step)
    assert (found.astype("float32").numpy() == expected).mean() > 0.8
    # of which the gradient is the product, in float32 here: there is no such product in 16 bits on a CPU
    gradient = np.array(case["output_gradient"], "float32") @ matrix.dense(dtype).astype("float32").numpy().T
    np.testing.assert_allclose(gradient, np.array(case["input_gradient"]), rtol=2 * step, atol=step / 4)


def _by_hand(x: np.ndarray, codes: np.ndarray, absmax: np.ndarray) -> np.ndarray:
    """The kernels of bitsandbytes in NumPy: integers in int64, one row after the other."""
    halves = x.astype("float16").astype("float32")
    outlying = np.abs(halves) >= 6
    columns = outlying.any(0)
    found = np.zeros([len(x), codes.shape[1]], "float32")
    for row, is_outlier, out in zip(halves, outlying, found):
        scale = np.abs(np.where(is_outlier, 0, row)).max()
        numbers = np.rint(row * np.float32(np.float32(127) / scale)).astype("int64")
        numbers[columns] = 0
        total = (numbers @ codes.astype("int64")).astype("float32")
        scaled = total * scale * absmax[0] * np.float32(6.200012e-05)
        out[:] = scaled.astype("float16")
    dense = codes[columns].astype("float32") * absmax * np.float32(0.007874015718698502)
    return found + x[:, columns] @ dense


def test_sums_of_many_integers_are_exact() -> None:
    """More inputs than float32 can sum: the largest sum is 3000 * 127**2, above 2**25."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, [6, 3000]).astype("float32")
    x[2] = np.abs(x[2]) + 2
    x[:, [5, 2999]] *= 9  # columns with outliers
    weight = np.abs(rng.normal(0, 0.1, [3000, 4])).astype("float32") + 0.2
    codes, absmax = FORMAT.quantise(weight)
    found = llm_int8.product(paddle.to_tensor(x), paddle.to_tensor(codes), paddle.to_tensor(absmax)).numpy()
    np.testing.assert_allclose(found, _by_hand(x, codes, absmax), rtol=2e-6, atol=1e-5)
    near = x @ weight
    assert np.abs(found - near).max() / np.abs(near).max() < 0.01


def test_columns_with_outliers_are_not_quantised() -> None:
    """They are computed with the full inputs: a large value does not make the others coarse."""
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, [4, 16]).astype("float32")
    weight = rng.normal(0, 1, [16, 3]).astype("float32")
    codes, absmax = FORMAT.quantise(weight)
    parts = (paddle.to_tensor(codes), paddle.to_tensor(absmax))
    dense = FORMAT.dequantise(codes, absmax)
    x[1, 3] = 500.0
    error = np.abs(llm_int8.product(paddle.to_tensor(x), *parts).numpy() - x @ dense)
    assert error.max() < 0.6  # half a float16 step of 500 * 2.5 is 0.5
    assert error[[0, 2, 3]].max() < 0.2


def test_shapes_and_values_that_are_no_numbers() -> None:
    matrix = _matrix(np.eye(4, 3, dtype="float32"))
    assert matrix.product(paddle.ones([2, 5, 4]), None).shape == [2, 5, 3]
    assert matrix.product(paddle.zeros([0, 4]), None).shape == [0, 3]
    assert not matrix.product(paddle.zeros([1, 4]), None).numpy().any()
    broken = paddle.to_tensor([[np.nan, 1.0, 1.0, 1.0], [1.0] * 4], "float32")
    found = matrix.product(broken, None).numpy()
    assert np.isnan(found[0]).all()
    assert np.abs(found[1] - 1).max() < 1e-2
    assert np.isinf(matrix.product(paddle.to_tensor([[np.inf, 0.0, 0.0, 0.0]]), None).numpy()).any()


def test_a_stack_multiplies_with_the_outliers_of_each_matrix() -> None:
    rng = np.random.default_rng(2)
    weight = rng.normal(0, 1, [3, 8, 4]).astype("float32")
    x = rng.normal(0, 1, [5, 8]).astype("float32")
    x[0, 1] = 9.0
    stack = _matrix(weight)
    rows = paddle.to_tensor(x)
    rows.stop_gradient = False
    found = stack.grouped_product(rows, [2, 0, 3])
    first = _matrix(weight[0]).product(paddle.to_tensor(x[:2]), None)
    last = _matrix(weight[2]).product(paddle.to_tensor(x[2:]), None)
    np.testing.assert_array_equal(found.numpy(), np.concatenate([first.numpy(), last.numpy()]))
    found.sum().backward()
    dense = [FORMAT.dequantise(*FORMAT.quantise(one)).sum(1) for one in weight]
    np.testing.assert_allclose(rows.grad.numpy(), np.stack([dense[0]] * 2 + [dense[2]] * 3), rtol=1e-5, atol=1e-6)


def test_the_format_of_a_full_matrix() -> None:
    assert FORMAT.shapes([6, 4]) == {CODES: (6, 4), ABSMAX: (1, 4)}
    assert FORMAT.shapes([2, 6, 4]) == {CODES: (2, 6, 4), ABSMAX: (2, 1, 4)}
    assert BlockFormat.from_json(FORMAT.to_json()) == FORMAT
    assert (FORMAT.described, FORMAT.is_of_full, BlockFormat("int8", 64).is_of_full) == ("llm_int8", True, False)
    weight = np.random.default_rng(3).normal(0, 1, [2, 6, 4]).astype("float32")
    weight[0, :, 1] = 0
    rounded = FORMAT.rounded(weight)
    assert np.abs(rounded - weight).max() <= np.abs(weight).max() / 127
    assert not rounded[0, :, 1].any()
    codes, absmax = FORMAT.quantise(weight[1])
    np.testing.assert_array_equal(rounded[1], FORMAT.dequantise(codes, absmax))
    on_device = dequantise_on_device(paddle.to_tensor(codes), paddle.to_tensor(absmax), FORMAT)
    np.testing.assert_array_equal(on_device.numpy(), rounded[1])


def test_a_linear_layer() -> None:
    linear = nn.Linear(6, 4)
    linear.bias.set_value(np.arange(4, dtype="float32"))
    layer = QuantisedLinear(linear, FORMAT)
    assert isinstance(layer.weight, LlmInt8Matrix)
    np.testing.assert_array_equal(layer(paddle.ones([1, 6])).numpy(), [[0.0, 1.0, 2.0, 3.0]])  # its codes are still 0
