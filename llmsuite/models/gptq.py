"""Matrices rounded to 4 bits so that a layer's outputs change least (Frantar et al. 2022, GPTQ, arXiv 2210.17323).

Inputs of a matrix are rounded one after the other, and what each rounding does to the outputs, by the inputs that were
seen, is taken back from the inputs that are still to come (algorithm 1 of the paper). Imports no Paddle.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import numpy as np

from llmsuite.models.block_quant import LEVELS, BlockFormat

_DAMPING = 0.01
"""Part of the mean of the diagonal that is added to it, as in the paper."""


def rounded_by_inputs(weight: np.ndarray, hessian: np.ndarray, form: BlockFormat) -> np.ndarray:
    """A matrix [I, O] whose values are those of a block format: storing it in that format changes nothing.

    Args:
        weight: [I, O].
        hessian: sum of x xᵀ over inputs x, [I, I].
        form: of 4 bits.
    """
    values, codes = weight.astype("float64"), np.sort(np.array(LEVELS[form.dtype], "float32"))
    middles = (codes[1:].astype("float64") + codes[:-1]) / 2
    upper = _inverse_factor(hessian.astype("float64"))
    found = np.empty(weight.shape, "float32")
    for first in range(0, len(values), form.block):
        end = first + form.block
        block, errors = values[first:end], np.empty((form.block, weight.shape[1]))
        # the largest of a block stays the largest, so that the block keeps its scale when it is stored
        largest, scales = np.abs(block).argmax(0), kept_scales(form.scales(block), form)
        divisors = np.where(scales != 0, scales, np.float32(1)).astype("float64")
        signs = np.sign(np.take_along_axis(block, largest[None], 0)[0] / divisors)
        for i in range(form.block):
            row, diagonal = block[i], upper[first + i, first + i]
            level = codes[np.searchsorted(middles, row / divisors)]
            level = np.where(largest == i, signs.astype("float32"), level)
            found[first + i] = level * scales
            errors[i] = (row - found[first + i]) / diagonal
            block[i + 1 :] -= np.outer(upper[first + i, first + i + 1 : end], errors[i])
        values[end:] -= upper[first:end, end:].T @ errors
    return found


def kept_scales(scales: np.ndarray, form: BlockFormat) -> np.ndarray:
    """Scales as files keep them, in float32: of int4 the steps between levels are float16 there."""
    if form.dtype != "int4":
        return scales.astype("float32")
    return (scales / 8).astype("float16").astype("float32") * np.float32(8)


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """The upper factor U of the inverse, inverse = Uᵀ U, of a Hessian made regular, [I, I]."""
    diagonal = np.einsum("ii->i", hessian)  # a view
    diagonal[diagonal == 0] = 1.0  # inputs that were never seen
    diagonal += _DAMPING * diagonal.mean()
    return np.linalg.cholesky(np.linalg.inv(hessian)).T
