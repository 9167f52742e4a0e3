"""Reads models with 4 bit matrices in the layout of AWQ checkpoints.

config.json     `quantization_config` {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
                "zero_point": true, …}
NAME.qweight    int32, [I, O / 8]: codes of 8 outputs in each number, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the
                lowest bits
NAME.scales     float16, [I / group_size, O]: the step between codes
NAME.qzeros     int32, [I / group_size, O / 8]: the code of 0, packed as the codes

The weight is (code - zero) * scale, rounded to float16. The layout and the rounding are AutoAWQ's (its
`utils/packing_utils.py`, `dequantize_gemm`). It is read as float32, a slice at a time.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.expected_tensor import FLOATS, WORDS, ExpectedTensor, check_scales
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec

_CODES = ".qweight"
_SCALES = ".scales"
_ZEROS = ".qzeros"
_PER_WORD = 8
"""Number of codes in a stored number."""
_SHIFTS = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], "uint32")
"""Lowest bit of the code of each of 8 consecutive outputs."""


@dataclasses.dataclass(frozen=True)
class AwqFormat:
    """Number of inputs that share a scale."""

    group: int = 128
    """Inputs of a group; -1 for all."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> AwqFormat | None:
        """Return the format that a config.json names; None for a model without AWQ.

        Raises:
            UserError: it is AWQ of another kind.
        """
        found = data.get("quantization_config")
        if not isinstance(found, Mapping) or found.get("quant_method") != "awq":
            return None
        bits = found.get("bits", found.get("w_bit"))
        group = found.get("group_size", found.get("q_group_size"))
        if type(bits) is not int or bits != 4:
            raise UserError(f"config.json: quantization_config.bits is {bits!r}; AWQ is read with 4")
        if type(group) is not int or (group < 1 and group != -1):
            raise UserError(
                f"config.json: quantization_config.group_size is {group!r}; it is a number of inputs, or -1 for all"
            )
        version = found.get("version", "gemm")
        if str(version).lower() != "gemm":
            raise UserError(f"config.json: quantization_config.version is {version!r}; AWQ is read as gemm")
        if found.get("zero_point", True) is not True:
            raise UserError("config.json: quantization_config.zero_point is not true; AWQ is read with zero points")
        return cls(group)


class AwqTensors:
    """Tensors of a directory; matrices with codes are read as float32 [O, I]."""

    def __init__(self, files: TensorFiles, form: AwqFormat):
        """Raises UserError when a matrix lacks a tensor, or they do not fit."""
        self._files = files
        self.form = form
        stored = set(files.names)
        self._packed = {name.removesuffix(_CODES) for name in stored if name.endswith(_CODES)}
        parts = {f"{name}{part}" for name in self._packed for part in (_SCALES, _ZEROS)}
        self._names = [
            f"{name.removesuffix(_CODES)}.weight" if name.endswith(_CODES) else name
            for name in files.names
            if name not in parts
        ]
        for name in sorted(self._packed):
            self._check(name, stored)

    def _check(self, layer: str, stored: set[str]) -> None:
        where = self._files.directory
        missing = [part for part in (_SCALES, _ZEROS) if layer + part not in stored]
        if missing:
            raise UserError(f"{where}: {layer}{_CODES} has no {layer}{missing[0]}")
        ExpectedTensor(WORDS, (None, None)).check(self._files.spec(layer + _CODES), where, "a matrix of codes")
        num_outputs, num_inputs = self._shape(layer)
        size = self._group_size(num_inputs)
        if num_inputs % size:
            raise UserError(f"{where}: {layer}{_CODES} has {num_inputs} inputs, which are no multiple of {size}")
        why = f"codes of [{num_outputs}, {num_inputs}] in groups of {self.form.group}"
        groups = num_inputs // size
        ExpectedTensor(FLOATS, (groups, num_outputs)).check(self._files.spec(layer + _SCALES), where, why)
        zeros = ExpectedTensor(WORDS, (groups, num_outputs // _PER_WORD))
        zeros.check(self._files.spec(layer + _ZEROS), where, why)

    def _group_size(self, num_inputs: int) -> int:
        return num_inputs if self.form.group == -1 else self.form.group

    def _shape(self, layer: str) -> tuple[int, int]:
        num_inputs, words = self._files.spec(layer + _CODES).shape
        return words * _PER_WORD, num_inputs

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def paths(self) -> list[Path]:
        return self._files.paths

    def spec(self, name: str) -> TensorSpec:
        layer = name.removesuffix(".weight")
        if layer in self._packed:
            return TensorSpec(name, self._shape(layer), "float32")
        return self._files.spec(name)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read a tensor, or a slice of it (one slice a dim). Only the slice of a matrix with codes is dequantised."""
        layer = name.removesuffix(".weight")
        if layer not in self._packed:
            return self._files.read(name, index)
        shape = self._shape(layer)
        (first, last), (begin, end) = (s.indices(n)[:2] for s, n in zip(index or [slice(None)] * 2, shape))
        words = slice(first // _PER_WORD, -(-last // _PER_WORD))
        columns = slice(first - words.start * _PER_WORD, last - words.start * _PER_WORD)
        groups = np.arange(begin, end) // self._group_size(shape[1])
        used = slice(int(groups.min()), int(groups.max()) + 1)
        codes = unpacked(self._files.read(layer + _CODES, [slice(begin, end), words]))[:, columns]
        zeros = unpacked(self._files.read(layer + _ZEROS, [used, words]))[:, columns]
        scales = self._files.read(layer + _SCALES, [used, slice(first, last)])
        check_scales(scales, layer + _SCALES, self._files.stored(layer + _SCALES).path)
        own = groups - used.start
        # a product of 5 bits and float16 is exact in float32, and rounded once
        found = ((codes - zeros[own]).astype("float32") * scales.astype("float32")[own]).astype(scales.dtype)
        return np.ascontiguousarray(found.T.astype("float32"))


def unpacked(words: np.ndarray) -> np.ndarray:
    """Unpack stored numbers [n, m] to codes [n, m * 8] int32."""
    codes = words.view("uint32")[:, :, None] >> _SHIFTS & np.uint32(15)
    return codes.reshape(len(words), -1).astype("int32")
