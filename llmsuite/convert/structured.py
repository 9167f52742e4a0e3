"""Updates of matrices by adapters that are no pair of factors, as matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from llmsuite.models.shard_plan import KRON_INNER, KRON_OUTER, SQUARE

PART = re.compile(rf"(.*)\.({SQUARE}|{KRON_OUTER}(?:_[ab])?|{KRON_INNER}(?:_[ab])?)(?:\.default)?")
"""A parameter of such an adapter: its module, and its last word. PEFT's w1 may be a product, too."""


def fits(parameters: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Whether the shapes of an adapter's parameters are those for a matrix [inputs, outputs]."""
    if any(len(of) != 2 or 0 in of for of in (shape, *parameters.values())):
        return False
    num_inputs, num_outputs = shape
    if parameters.keys() == {SQUARE}:
        height, width = parameters[SQUARE]
        return height == width and height % 2 == 0 and height <= 2 * num_inputs
    outer, inner = (_side(parameters, stem) for stem in (KRON_OUTER, KRON_INNER))
    if outer is None or inner is None or len(outer[0]) + len(inner[0]) != len(parameters):
        return False
    (_, rows, columns), (_, inner_rows, inner_columns) = outer, inner
    return (columns * inner_columns, rows * inner_rows) == (num_inputs, num_outputs)


def update(parameters: Mapping[str, np.ndarray], shape: tuple[int, ...], scale: float) -> np.ndarray:
    """What such an adapter adds to W [inputs, outputs], in float32; `fits` is true of them."""
    if SQUARE in parameters:
        return mora_update(parameters[SQUARE], shape)
    outer, inner = (_product(parameters, stem) for stem in (KRON_OUTER, KRON_INNER))
    return (scale * np.kron(outer, inner).T).astype("float32")


def _side(parameters: Mapping[str, tuple[int, ...]], stem: str) -> tuple[list[str], int, int] | None:
    """The parameters of one factor of a Kronecker product, its rows and columns; None where they make none."""
    if stem in parameters:
        rows, columns = parameters[stem]
        return [stem], rows, columns
    pair = [f"{stem}_a", f"{stem}_b"]
    if not all(name in parameters for name in pair) or parameters[pair[0]][1] != parameters[pair[1]][0]:
        return None
    return pair, parameters[pair[0]][0], parameters[pair[1]][1]


def _product(parameters: Mapping[str, np.ndarray], stem: str) -> np.ndarray:
    if stem in parameters:
        return parameters[stem].astype("float32")
    return parameters[f"{stem}_a"].astype("float32") @ parameters[f"{stem}_b"].astype("float32")


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
