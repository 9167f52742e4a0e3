"""The int8 grid of quantised tensors in NumPy; `qat.py` computes the same in training. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVELS = 127
"""Steps on either side of zero."""
LEAST = 1e-12
"""Lower bound of a largest magnitude: without it the scale of an output whose weights are all zero would be 0."""


def weight_scale(weight: np.ndarray) -> np.ndarray:
    """The scale of each output of a weight [inputs, outputs], [outputs] in float32: the largest magnitude / 127."""
    largest = np.maximum(np.abs(weight.astype("float32")).max(0), np.float32(LEAST))
    return largest * np.float32(1.0 / LEVELS)


def to_int8(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The int8 values q of a weight, at most 127 in magnitude: q times the scale is its fake-quantised value."""
    return np.rint(weight.astype("float32") / scale).astype("int8")


def input_scale(observed: Sequence[float]) -> float | None:
    """The scale of inputs, rounded to float32; None when none were observed.

    `observed` is (a, n), where a / n is their average largest magnitude, or empty where inputs are not quantised.
    """
    if not observed or observed[0] <= 0:
        return None
    return float(np.float32(observed[0] / observed[1] / LEVELS))
