"""Reads, a slice at a time, models whose experts are in MXFP4, as gpt-oss is published.

config.json        `quantization_config` {"quant_method": "mxfp4", …}
NAME_blocks        uint8, [E, O, I / 32, 16]: codes of 4 bits, e2m1, of 32 inputs a block; the one with the even number
                   in the lower half of a byte
NAME_scales        uint8, [E, O, I / 32]: the exponent of each block, plus 127

NAME, a stack of matrices [E, I, O], is code times 2^exponent (Open Compute Project, Microscaling Formats Specification
1.0, section 5.3): exact in bfloat16, in which it is read.

Shapes: E experts, I inputs and O outputs of the matrix of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.expected_tensor import ExpectedTensor
from llmsuite.checkpoint.stored import UINT8
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec

_BLOCKS = "_blocks"
_SCALES = "_scales"
_BLOCK = 32
"""Inputs that share an exponent."""
_BIAS = 127
_NAN = 255
"""The exponent that stands for no number."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], "float32")
"""Value of each code: the upper bit is the sign."""


def is_mxfp4(data: Mapping[str, Any]) -> bool:
    """Return True if a config.json names MXFP4."""
    found = data.get("quantization_config")
    return isinstance(found, Mapping) and found.get("quant_method") == "mxfp4"


class Mxfp4Tensors:
    """Tensors of a directory; stacks in MXFP4 are read as bfloat16 [E, I, O]."""

    def __init__(self, files: TensorFiles):
        """Raises UserError when a stack lacks its exponents, or they do not fit."""
        self._files = files
        stored = set(files.names)
        self._stacks = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
        scales = {f"{name}{_SCALES}" for name in self._stacks}
        self._names = [
            name.removesuffix(_BLOCKS) if name.endswith(_BLOCKS) else name for name in files.names if name not in scales
        ]
        for name in sorted(self._stacks):
            if f"{name}{_SCALES}" not in stored:
                raise UserError(f"{files.directory}: {name}{_BLOCKS} has no {name}{_SCALES}")
            blocks = files.spec(name + _BLOCKS)
            why = f"the codes of a stack in blocks of {_BLOCK} inputs"
            ExpectedTensor((UINT8,), (None, None, None, _BLOCK // 2)).check(blocks, files.directory, why)
            why = f"exponents of codes of {list(blocks.shape)}"
            ExpectedTensor((UINT8,), blocks.shape[:3]).check(files.spec(name + _SCALES), files.directory, why)

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def paths(self) -> list[Path]:
        return self._files.paths

    def spec(self, name: str) -> TensorSpec:
        if name not in self._stacks:
            return self._files.spec(name)
        experts, outputs, blocks, _ = self._files.spec(name + _BLOCKS).shape
        return TensorSpec(name, (experts, blocks * _BLOCK, outputs), "bfloat16")

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read a tensor, or a slice of it (one slice a dim). Only the blocks of the slice are dequantised."""
        if name not in self._stacks:
            return self._files.read(name, index)
        shape = self.spec(name).shape
        experts, inputs, outputs = (slice(*s.indices(n)[:2]) for s, n in zip(index or [slice(None)] * 3, shape))
        blocks = slice(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK))
        codes = self._files.read(name + _BLOCKS, [experts, outputs, blocks, slice(0, _BLOCK // 2)])
        exponents = self._files.read(name + _SCALES, [experts, outputs, blocks])
        if (exponents == _NAN).any():
            path = self._files.stored(name + _SCALES).path
            raise UserError(f"{path}: {name + _SCALES!r} has exponents that stand for NaN; use another copy")
        start = blocks.start * _BLOCK
        values = dequantise(codes, exponents)[:, :, inputs.start - start : inputs.stop - start]
        return np.ascontiguousarray(values.transpose(0, 2, 1)).astype("bfloat16")


def dequantise(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Convert codes [E, O, blocks, 16] with exponents [E, O, blocks], both uint8, to float32 [E, O, 32 blocks]."""
    halves = np.stack([codes & 15, codes >> 4], -1)
    values = np.take(_LEVELS, halves).reshape(*exponents.shape, _BLOCK)
    scaled = np.ldexp(values, exponents.astype("int32")[..., None] - _BIAS)
    return scaled.reshape(*exponents.shape[:2], -1)
