"""Updates of matrices by adapters that are no pair of factors, as matrices."""

from __future__ import annotations

import numpy as np


def mora_update(square: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What MoRA adds to W [inputs, outputs]: `models.structured.mora_update` as a matrix.

    Piece i of the inputs, rotated by R(i), times M is R(i) M times piece i: blocks on a diagonal, of which the last one
    goes on with the first inputs, and which are repeated along the outputs.

    Args:
        square: M [S, S].
        shape: of W.
    """
    size, (num_inputs, num_outputs) = square.shape[0], shape
    half, num_pieces = size // 2, -(-num_inputs // size)
    frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
    made = np.zeros((num_inputs, num_pieces * size), "float64")
    for i in range(num_pieces):
        angles = i * np.concatenate([frequencies, frequencies])[:, None]
        cos, sin = np.cos(angles) * square, np.sin(angles) * square
        rotated = cos + np.concatenate([sin[half:], -sin[:half]])
        inputs = np.arange(i * size, (i + 1) * size) % num_inputs
        np.add.at(made, (inputs[:, None], np.arange(i * size, (i + 1) * size)[None]), rotated)
    repeats = -(-num_outputs // made.shape[1])
    return np.concatenate([made] * repeats, 1)[:, :num_outputs].astype("float32")
