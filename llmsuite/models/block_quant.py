"""Matrices stored in 4 or 8 bits, a block at a time (Dettmers et al. 2023, QLoRA, arXiv 2305.14314, section 3).

A block is `block` inputs of one output; its scale is its largest magnitude. In 4 bits a value divided by the scale is
the nearest of 16 levels, those of nf4 (appendix E of the paper: quantiles of a normal distribution), of fp4 (2 bits of
exponent, 1 of mantissa) or of int4 (16 even steps); in int8 one of 255 even steps. Halves round down in 4 bits, to even
in int8.

llm_int8 has one block for all inputs, of values rounded to float16; its products are those of `llm_int8`.

Of 16 even steps around 0 one side has one more. In int4 that is the side of the block's largest value: its scale has
the sign of that value, which is stored exactly, as llama.cpp's Q4_0 does.

Codes of 4 bits lie two in a byte, the input with the even number in the upper half: transposed, these are the bytes
that bitsandbytes stores of a matrix [outputs, inputs] whose rows are whole blocks (fp4 has two zeros, of which it may
take the other one). Imports no Paddle.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmsuite.models.scale_quant import dequantise_scales, num_scale_blocks, quantise_scales

if TYPE_CHECKING:  # imported where it computes: a recipe is read without NumPy
    import numpy as np

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = (*(m / 12 for m in _MAGNITUDES), *(-m / 12 for m in _MAGNITUDES))
"""The upper bit of a code is the sign. The least magnitude is that of bitsandbytes, 1 / 192."""
INT4 = tuple(1 - code / 8 for code in range(16))
LEVELS = {"nf4": NF4, "fp4": FP4, "int4": INT4}
"""The value of each code."""
_STEPS = 127
LLM_INT8 = "llm_int8"
"""Name of the format whose blocks are all inputs of a matrix."""
_IN_8_BITS = ("int8", LLM_INT8)
CODES = "codes"
ABSMAX = "absmax"
NESTED_ABSMAX = "nested_absmax"
NESTED_OFFSET = "nested_offset"
"""Names of the stored parts of a matrix, appended to the name of its parameter. The last two are there where the scales
are quantised themselves, see `scale_quant`."""
PARTS = (CODES, ABSMAX, NESTED_ABSMAX, NESTED_OFFSET)
DEQUANTISE_BYTES = 10
"""Bytes of temporaries for each value of a matrix that a device dequantises: wide codes, and both halves before they
are joined (`quantised.dequantise_on_device`)."""


def is_quantised_part(parameter: str) -> bool:
    """True if a parameter is the codes or the scales of a quantised matrix."""
    return parameter.rpartition(".")[2] in PARTS


def is_nested_part(parameter: str) -> bool:
    """True if a parameter belongs to the scales of a full matrix, so that tensor parallel does not split it."""
    return parameter.endswith((f".{NESTED_ABSMAX}", f".{NESTED_OFFSET}"))


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Storage format of a matrix [I, O]: codes, and the scale of each block, [I / block, O]: in float32, or quantised.

    A stack of matrices [E, I, O] is stored as stacks of their codes and scales.
    """

    dtype: str
    """nf4, fp4, int4, int8 or llm_int8."""
    block: int
    """Inputs of a block: even, and a divisor of I. 0 with llm_int8."""
    double_quant: bool = False
    """True where the scales are quantised themselves, see `scale_quant`."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlockFormat:
        """Make a format from what `to_json` returned."""
        return cls(data["dtype"], data["block"], bool(data.get("double_quant")))

    def to_json(self) -> dict[str, Any]:
        """Return the format as JSON data."""
        doubled = {"double_quant": True} if self.double_quant else {}
        return {"dtype": self.dtype, "block": self.block, **doubled}

    @property
    def described(self) -> str:
        """The format in words, for messages."""
        if self.dtype == LLM_INT8:
            return self.dtype
        scales = ", with quantised scales" if self.double_quant else ""
        return f"{self.dtype} in blocks of {self.block}{scales}"

    @property
    def per_code(self) -> int:
        """Values in an element of the codes."""
        return 1 if self.has_steps else 2

    @property
    def stored_dtype(self) -> str:
        """Dtype of the codes."""
        return "int8" if self.has_steps else "uint8"

    @property
    def has_steps(self) -> bool:
        """True for 255 even steps in 8 bits."""
        return self.dtype in _IN_8_BITS

    @property
    def is_of_full(self) -> bool:
        """True if codes and scales of a part of a matrix depend on all of it."""
        return self.double_quant or self.dtype == LLM_INT8

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of each part, by its name, in the order in which they are stored."""
        if not self.double_quant:
            return {CODES: self.stored_dtype, ABSMAX: "float32"}
        return {CODES: self.stored_dtype, ABSMAX: "uint8", NESTED_ABSMAX: "float32", NESTED_OFFSET: "float32"}

    def shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the parts of a matrix or a stack, by their names."""
        *stack, num_inputs, num_outputs = shape
        block = num_inputs if self.dtype == LLM_INT8 else self.block
        assert num_inputs % block == 0, (shape, self)
        num_rows = num_inputs // block
        found: dict[str, tuple[int, ...]] = {
            CODES: (*stack, num_inputs // self.per_code, num_outputs),
            ABSMAX: (*stack, num_rows, num_outputs),
        }
        if self.double_quant:
            found[NESTED_ABSMAX] = (*stack, num_scale_blocks(num_rows * num_outputs))
            found[NESTED_OFFSET] = (*stack, 1)
        return found

    def parts(self, matrix: np.ndarray) -> dict[str, np.ndarray]:
        """The stored parts of a matrix, by their names; if `is_of_full`, of a full matrix."""
        codes, absmax = self.quantise(matrix)
        if not self.double_quant:
            return {CODES: codes, ABSMAX: absmax}
        return dict(zip(PARTS, (codes, *quantise_scales(absmax))))

    def in_matrix(self, part: str, index: Sequence[slice]) -> list[slice]:
        """The slice of the matrix or stack whose codes or scales are a slice of them."""
        times = self.per_code if part == CODES else self.block
        (*stack, inputs, outputs) = index
        return [*stack, slice(inputs.start * times, inputs.stop * times), outputs]

    def quantise(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes and float32 scales of a matrix, or of whole blocks of it."""
        import numpy as np

        if self.dtype == LLM_INT8:
            return _in_steps_of_outputs(values)
        shapes = self.shapes(values.shape)
        codes = np.empty(shapes[CODES], self.stored_dtype)
        absmax = np.empty(shapes[ABSMAX], "float32")
        rows = self.block // self.per_code
        for number in range(len(absmax)):  # block by block, so that temporary arrays stay small
            block = values[number * self.block : (number + 1) * self.block].astype("float32", copy=False)
            absmax[number] = self.scales(block)
            scaled = block / np.where(absmax[number] != 0, absmax[number], np.float32(1))
            codes[number * rows : (number + 1) * rows] = self._codes(scaled)
        return codes, absmax

    def scales(self, block: np.ndarray) -> np.ndarray:
        """The scale of each output of a block [inputs, O]."""
        import numpy as np

        if self.dtype != "int4":
            return np.asarray(np.abs(block).max(0))
        return np.asarray(np.take_along_axis(block, np.abs(block).argmax(0)[None], 0)[0])

    def _codes(self, scaled: np.ndarray) -> np.ndarray:
        """Codes of values from -1 to 1."""
        import numpy as np

        if self.has_steps:
            return np.rint(scaled * np.float32(_STEPS)).astype("int8")
        order, middles = _thresholds(self.dtype)
        number = np.zeros(scaled.shape, "uint8")
        for middle in middles:
            number += scaled > middle
        codes = order[number].reshape(-1, 2, scaled.shape[1])
        return codes[:, 0] << 4 | codes[:, 1]

    def dequantise(self, codes: np.ndarray, absmax: np.ndarray) -> np.ndarray:
        """The matrix in float32."""
        import numpy as np

        num_blocks, num_outputs = absmax.shape
        if self.has_steps:
            found = codes.reshape(num_blocks, -1, num_outputs) * (absmax * np.float32(1 / _STEPS))[:, None]
            return found.reshape(codes.shape)
        upper, lower = byte_levels(self.dtype)
        found = np.empty((codes.shape[0], 2, num_outputs), "float32")
        for first in range(0, codes.shape[0], _ROWS):  # `take` needs intp indices, eight times as many bytes
            wide = codes[first : first + _ROWS].astype("intp")
            upper.take(wide, out=found[first : first + _ROWS, 0], mode="clip")
            lower.take(wide, out=found[first : first + _ROWS, 1], mode="clip")
        found = found.reshape(num_blocks, self.block, num_outputs)
        found *= absmax[:, None]
        return found.reshape(-1, num_outputs)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """A matrix or a stack quantised and dequantised again, in float32; if `is_of_full`, full ones."""
        import numpy as np

        if not self.is_of_full:
            flat = values.reshape(-1, values.shape[-1])  # no block spans two matrices of a stack
            return self.dequantise(*self.quantise(flat)).reshape(values.shape)
        found = np.empty(values.shape, "float32")
        for matrix, rounded in zip(values.reshape(-1, *values.shape[-2:]), found.reshape(-1, *values.shape[-2:])):
            codes, absmax, *nested = self.parts(matrix).values()
            if nested:
                absmax = dequantise_scales(absmax, nested[0], nested[1])
            rounded[:] = self.dequantise(codes, absmax)
        return found


def _in_steps_of_outputs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [I, O] and scales [1, O] of llm_int8 for a full matrix, as bitsandbytes rounds them."""
    import numpy as np

    halves = values.astype("float16").astype("float32")
    absmax = np.abs(halves).max(0)
    factor = np.float32(_STEPS) / np.where(absmax != 0, absmax, np.float32(1))
    return np.rint(halves * factor).astype("int8"), absmax[None]


def block_format(dtype: str, num_inputs: int) -> BlockFormat:
    """The blocks of a matrix that is rounded for generation: the largest power of two that divides the number of
    inputs, up to 64."""
    return BlockFormat(dtype, min(_MAX_BLOCK, num_inputs & -num_inputs))


_MAX_BLOCK = 64
"""Most inputs of a block in generation."""
_ROWS = 32
"""Rows of codes that are looked up in one call."""


@functools.cache
def byte_levels(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The levels of the upper and the lower half of every byte, [256] each."""
    import numpy as np

    levels = np.array(LEVELS[dtype], "float32")
    return np.repeat(levels, 16), np.tile(levels, 16)


@functools.cache
def _thresholds(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The codes in the order of their levels, and the middles between neighbours."""
    import numpy as np

    ordered, order = np.unique(np.array(LEVELS[dtype]), return_index=True)  # fp4 has two zeros: the first one is used
    return order.astype("uint8"), ((ordered[1:] + ordered[:-1]) / 2).astype("float32")
