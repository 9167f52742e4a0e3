"""Products with a matrix in 8 bits, as LLM.int8 computes them (Dettmers et al. 2022, arXiv 2208.07339, section 3).

The matrix has one scale for each output, its largest magnitude. The inputs are rounded to float16 and quantised too, by
the largest magnitude of each row. A column of the inputs with an outlier, a magnitude of `THRESHOLD` or more in any
row, is left out of that product: its products are computed in the dtype of x, with the dequantised matrix, and added.

The rounding is that of bitsandbytes' CUDA kernels: products of integers are exact, their sum times the scales becomes
float16, and a bias is added before the products of the outliers. As there, the columns with outliers depend on all rows
of a product, so that numbers depend on what is in a micro-batch.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import paddle

from llmsuite.base.typing import Tensor

THRESHOLD = 6.0
"""Smallest magnitude of an outlier, the default of bitsandbytes."""
_EXACT_INPUTS = 1024
"""Inputs whose products are summed in float32: integers below 2**24, which are exact, as 1024 * 127 * 127 is."""
_INVERSE_SQUARE = 6.200012e-05
"""1 / 127**2 as written in the CUDA kernel."""
_INVERSE = 0.007874015718698502
"""1 / 127 as bitsandbytes writes it, for the matrix of the outliers."""
_ROUNDING = 1.5 * 2**23
"""Added to and subtracted from a float32 below 2**22, it leaves the nearest integer, halves to even; `paddle.round`
takes halves away from 0."""


def product(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times the matrix, plus a bias, [N, O] in the dtype of x.

    Args:
        x: [N, I].
        codes: int8, [I, O].
        absmax: float32, [1, O]: the scale of each output.
        bias: [O].
    """
    num_rows, num_inputs = x.shape
    if num_rows == 0:
        return paddle.zeros([0, codes.shape[1]], x.dtype)
    halves = x.astype("float16").astype("float32")
    is_outlier = halves.abs() >= THRESHOLD
    rows, scales = _quantised(halves, is_outlier)
    total = paddle.zeros([num_rows, codes.shape[1]], "int32")
    for first in range(0, num_inputs, _EXACT_INPUTS):
        part = slice(first, min(first + _EXACT_INPUTS, num_inputs))
        total += paddle.matmul(rows[:, part], codes[part].astype("float32")).astype("int32")
    found = _with_bias(total.astype("float32") * scales * absmax, bias).astype(x.dtype)
    columns = paddle.nonzero(is_outlier.any(0)).flatten()
    if columns.shape[0] == 0:
        return found
    return _with_outliers(found, x, codes, absmax, columns)


def _quantised(halves: Tensor, is_outlier: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as integers in float32, [N, I], with 0 in columns with outliers; and their scales, [N, 1]."""
    rest = paddle.where(is_outlier, paddle.zeros_like(halves), halves)
    scales = rest.abs().max(-1, keepdim=True)
    rows = rest * (127.0 / paddle.where(scales > 0, scales, paddle.ones_like(scales)))
    rows = rows + _ROUNDING
    rows = rows - _ROUNDING
    rows = paddle.where(is_outlier.any(0, keepdim=True), paddle.zeros_like(rows), rows)
    # the maximum may skip a NaN, and an integer cannot be one: the scale of such a row becomes NaN
    return rows, scales + 0.0 * rest.sum(-1, keepdim=True)


def _with_bias(scaled: Tensor, bias: Tensor | None) -> Tensor:
    """The product in float16: of integers times scales, plus a bias. A bias in float16 is added before the product is
    rounded, another one afterwards."""
    products = scaled * _INVERSE_SQUARE
    if bias is None:
        return products.astype("float16")
    if bias.dtype == paddle.float16:
        return (products + bias.astype("float32")).astype("float16")
    return (products.astype("float16").astype("float32") + bias.astype("float32")).astype("float16")


def _with_outliers(found: Tensor, x: Tensor, codes: Tensor, absmax: Tensor, columns: Tensor) -> Tensor:
    """The product plus that of these columns of x, rounded once."""
    matrix = (paddle.gather(codes.astype("int32"), columns).astype("float32") * absmax * _INVERSE).astype(x.dtype)
    inputs = paddle.index_select(x.astype("float32"), columns, 1)  # on a CPU there is no kernel for float16
    added = paddle.matmul(inputs, matrix.astype("float32"))
    return (found.astype("float32") + added).astype(x.dtype)
