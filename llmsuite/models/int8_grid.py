"""The grid that int8 leaves of a tensor, as NumPy has it; `qat.py` is the same in training. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVELS = 127
"""Of either sign."""
LEAST = 1e-12
"""A largest magnitude below it counts as this one: an output whose weights are all zero has a scale too."""


def weight_scale(weight: np.ndarray) -> np.ndarray:
    """The scale of each output of a weight [inputs, outputs], [outputs] in float32: the largest magnitude / 127."""
    largest = np.maximum(np.abs(weight.astype("float32")).max(0), np.float32(LEAST))
    return largest * np.float32(1.0 / LEVELS)


def to_int8(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The steps q of a weight: q times the scale is what fake quantisation makes of it. None is beyond 127."""
    return np.rint(weight.astype("float32") / scale).astype("int8")


def input_scale(observed: Sequence[float]) -> float | None:
    """The scale, a float32, of inputs whose largest magnitude a / n is on average; None when none was seen.

    `observed` has a and n, or nothing where inputs are not rounded.
    """
    if not observed or observed[0] <= 0:
        return None
    return float(np.float32(observed[0] / observed[1] / LEVELS))
