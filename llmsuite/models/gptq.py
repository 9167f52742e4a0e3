"""Matrices rounded to 4 bits so that a layer's outputs change least (Frantar et al. 2022, GPTQ, arXiv 2210.17323).

The inputs of a matrix are rounded one after the other, and the rows that are not yet rounded compensate the error of
each rounding on the calibration inputs (algorithm 1 of the paper). Imports no Paddle.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import numpy as np

from llmsuite.models.block_quant import LEVELS, BlockFormat

_DAMPING = 0.01
"""Fraction of the mean of the Hessian's diagonal that is added to it, as in the paper."""


def rounded_by_inputs(weight: np.ndarray, hessian: np.ndarray, form: BlockFormat) -> np.ndarray:
    """A matrix [I, O] rounded to values that a block format stores exactly.

    Args:
        weight: [I, O].
        hessian: sum of x xᵀ over calibration inputs x, [I, I].
        form: a block format of 4 bits.
    """
    values = weight.astype("float64")
    codes = np.sort(np.array(LEVELS[form.dtype], "float32"))
    middles = (codes[1:].astype("float64") + codes[:-1]) / 2
    upper = _inverse_factor(hessian.astype("float64"))
    found = np.empty(weight.shape, "float32")
    for first in range(0, len(values), form.block):
        end = first + form.block
        block = values[first:end]
        errors = np.empty((form.block, weight.shape[1]))
        # the largest value of a block stays the largest, so that storing the block computes the same scale again
        largest = np.abs(block).argmax(0)
        scales = kept_scales(form.scales(block), form)
        divisors = np.where(scales != 0, scales, np.float32(1)).astype("float64")
        signs = np.sign(np.take_along_axis(block, largest[None], 0)[0] / divisors)
        for i in range(form.block):
            row = block[i]
            diagonal = upper[first + i, first + i]
            level = codes[np.searchsorted(middles, row / divisors)]
            level = np.where(largest == i, signs.astype("float32"), level)
            found[first + i] = level * scales
            errors[i] = (row - found[first + i]) / diagonal
            block[i + 1 :] -= np.outer(upper[first + i, first + i + 1 : end], errors[i])
        values[end:] -= upper[first:end, end:].T @ errors
    return found


def kept_scales(scales: np.ndarray, form: BlockFormat) -> np.ndarray:
    """Scales as files store them, in float32: for int4 the files have the step between levels in float16."""
    if form.dtype != "int4":
        return scales.astype("float32")
    return (scales / 8).astype("float16").astype("float32") * np.float32(8)


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor U of the inverse of a damped Hessian, inverse = Uᵀ U, [I, I]."""
    diagonal = np.einsum("ii->i", hessian)  # a view
    diagonal[diagonal == 0] = 1.0  # inputs that were 0 in all of the calibration
    diagonal += _DAMPING * diagonal.mean()
    return np.linalg.cholesky(np.linalg.inv(hessian)).T
