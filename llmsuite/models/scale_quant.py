"""Double quantisation: scales of a matrix's blocks that are in 8 bits themselves (Dettmers et al. 2023, QLoRA, arXiv
2305.14314, section 3).

The scales of a matrix, output after output, are flattened and cut into blocks of 256. Their mean is subtracted, and
what is left is quantised by the signed dynamic map, with one float32 scale for each block: the codes, scales and offset
of bitsandbytes for the transposed matrix. They depend on the full matrix. A rank has the slice of the codes that
belongs to its slice of the matrix, and all of the few scales of blocks. Imports no Paddle.

Shapes: a matrix has R scales for each of O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmsuite.models.dynamic_map import BLOCK, dynamic_map, quantise_blocks

if TYPE_CHECKING:  # imported where it computes: a recipe is read without NumPy
    import numpy as np


def num_scale_blocks(num_scales: int) -> int:
    """Number of blocks of scales in a matrix."""
    return -(-num_scales // BLOCK)


def quantise_scales(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise the scales of a full matrix.

    Args:
        absmax: scales in float32, [R, O].

    Returns:
        Their codes [R, O], the scales of blocks of them, and their mean [1].
    """
    import numpy as np

    flat = np.ascontiguousarray(absmax.T).reshape(-1)
    offset = flat.mean(dtype="float64").astype("float32")
    codes, nested_absmax = quantise_blocks(flat - offset)
    by_output = codes.reshape(absmax.shape[1], absmax.shape[0])
    return np.ascontiguousarray(by_output.T), nested_absmax, offset.reshape(1)


def dequantise_scales(
    codes: np.ndarray,
    nested_absmax: np.ndarray,
    nested_offset: np.ndarray,
    num_rows: int | None = None,
    first: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """Dequantise scales, or a slice of them.

    Args:
        codes: of the slice, [rows, outputs].
        nested_absmax: scales of all blocks.
        nested_offset: mean of all scales, [1].
        num_rows: R of the full matrix; None where `codes` has all.
        first: row and output of the full matrix at which the slice begins.

    Returns:
        The scales in float32, as `codes`.
    """
    import numpy as np

    rows, outputs = (np.arange(start, start + size) for start, size in zip(first, codes.shape))
    numbers = (outputs * (codes.shape[0] if num_rows is None else num_rows) + rows[:, None]) // BLOCK
    found: np.ndarray = dynamic_map(True)[codes] * nested_absmax[numbers] + nested_offset
    return found
