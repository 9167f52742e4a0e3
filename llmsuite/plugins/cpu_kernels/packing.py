"""Layout of packed matrices for the kernels of generation: in bf16, or in blocks of 8 or 4 bits (`models.block_quant`).

The outputs of a matrix [I, O] are in tiles of 32, the last one padded with zeros; a tile has its blocks of inputs one
after the other. A block is the scale of each output, float32 (none in bf16), then the codes, input by input; in 4 bits
two inputs share a byte. So a matmul with a few rows reads the bytes of its outputs sequentially.

`sources/stored.h` reads this layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np
from paddle.utils.dlpack import from_dlpack

from llmsuite.devices.decoding_ops import MatrixPart, PackedWeight
from llmsuite.models.block_quant import LEVELS, block_format
from llmsuite.plugins.cpu_kernels.decoder_weights import Codes
from llmsuite.plugins.cpu_kernels.libraries import TILE

_CHUNK_BYTES = 32 << 20
"""Size in float32 of the chunks that are read."""


def _in_bf16(levels: Sequence[float]) -> tuple[float, ...]:
    """Levels rounded to bfloat16, in which kernels multiply: a relative error of at most 1/512."""
    return tuple(np.asarray(levels, "float32").astype(ml_dtypes.bfloat16).astype("float32").tolist())


_CODES = {
    "bf16": Codes(16),
    "int8": Codes(8),
    **{name: Codes(4, _in_bf16(levels)) for name, levels in LEVELS.items()},
}


def codes_of(precision: str) -> Codes:
    """The `Codes` of a precision."""
    return _CODES[precision]


def rounded(values: np.ndarray, precision: str) -> np.ndarray:
    """A matrix [I, O] with the values that kernels read after packing, in float32."""
    if precision == "bf16":
        return values.astype(ml_dtypes.bfloat16).astype("float32")
    blocks = block_format(precision, len(values))
    if precision == "int8":
        return blocks.rounded(values)
    codes, scales = blocks.quantise(values)
    both = np.stack([codes >> 4, codes & 15], 1).reshape(len(values), -1)
    return np.asarray(codes_of(precision).levels, "float32")[both] * np.repeat(scales, blocks.block, 0)


def pack(values: np.ndarray, precision: str) -> np.ndarray:
    """Pack some outputs of a matrix into bytes, [tiles, bytes of a tile].

    Args:
        values: [I, n].
        precision: bf16, int8, nf4, fp4 or int4.
    """
    missing = -values.shape[1] % TILE
    if missing:
        values = np.pad(values, [(0, 0), (0, missing)])
    num_inputs = len(values)
    num_tiles = values.shape[1] // TILE
    if precision == "bf16":
        as_bf16 = values.astype(ml_dtypes.bfloat16).view("uint16").reshape(num_inputs, num_tiles, TILE)
        return np.ascontiguousarray(as_bf16.transpose([1, 0, 2])).reshape(num_tiles, -1).view("uint8")
    blocks = block_format(precision, num_inputs)
    codes, scales = blocks.quantise(values)
    if precision == "int8":
        scales = scales * np.float32(1 / 127)
    by_tile = scales.reshape(-1, num_tiles, TILE).transpose([1, 0, 2])
    of_scales = np.ascontiguousarray(by_tile).view("uint8")
    by_tile = codes.reshape(len(scales), -1, num_tiles, TILE).transpose([2, 0, 1, 3])
    of_codes = np.ascontiguousarray(by_tile).view("uint8").reshape(num_tiles, len(scales), -1)
    return np.concatenate([of_scales, of_codes], 2).reshape(num_tiles, -1)


def pack_parts(parts: Sequence[MatrixPart], num_inputs: int, precision: str) -> PackedWeight:
    """Pack the outputs of several parameters into one matrix. Only a chunk of their values is in memory at a time."""
    num_outputs = sum(part.num_outputs for part in parts)
    packed = from_dlpack(_packed(parts, num_inputs, precision))
    return PackedWeight(packed, codes_of(precision), num_inputs, num_outputs)


def pack_stack(matrices: Sequence[MatrixPart], num_inputs: int, precision: str) -> PackedWeight:
    """Pack matrices of one shape, such as those of experts, into one stack. Only a chunk of values is in memory at a
    time."""
    stack: np.ndarray | None = None
    for number, matrix in enumerate(matrices):
        packed = _packed([matrix], num_inputs, precision)
        if stack is None:
            stack = np.empty([len(matrices), *packed.shape], "uint8")
        stack[number] = packed
    assert stack is not None, "a stack of no matrices"
    return PackedWeight(from_dlpack(stack), codes_of(precision), num_inputs, matrices[0].num_outputs)


def _packed(parts: Sequence[MatrixPart], num_inputs: int, precision: str) -> np.ndarray:
    """The bytes of the outputs of several parameters, [tiles, bytes of a tile]."""
    num_outputs = sum(part.num_outputs for part in parts)
    chunk = max(1, _CHUNK_BYTES // (4 * num_inputs * TILE)) * TILE
    packed: np.ndarray | None = None
    for first in range(0, num_outputs, chunk):
        values = np.concatenate(list(_read_outputs(parts, first, min(num_outputs, first + chunk))), 1)
        tiles = pack(values, precision)
        if packed is None:
            packed = np.empty([-(-num_outputs // TILE), tiles.shape[1]], "uint8")
        packed[first // TILE : first // TILE + len(tiles)] = tiles
    assert packed is not None, "a matrix without outputs"
    return packed


def _read_outputs(parts: Sequence[MatrixPart], first: int, end: int) -> Iterator[np.ndarray]:
    """Values of the outputs in [first, end), parameter by parameter."""
    begin = 0
    for part in parts:
        start = max(first - begin, 0)
        stop = min(end - begin, part.num_outputs)
        if start < stop:
            yield part.read(start, stop)
        begin += part.num_outputs
