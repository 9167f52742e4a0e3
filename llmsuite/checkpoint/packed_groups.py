"""Reads matrices whose codes are packed into int32 numbers and share a scale in groups of inputs: GPTQ and AWQ.

NAME.qweight    int32, [I, O] codes, packed along one of the dims
NAME.scales     float16, [groups, O]: the step between codes
NAME.qzeros     int32, [groups, O] codes of 0, packed along the outputs
NAME.g_idx      int32, [I]: the group of each input, in formats that have it; without it, the inputs of a group follow
                each other

The weight is (code - zero) * scale. It is read as float32, a slice at a time.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.expected_tensor import FLOATS, INDEXES, WORDS, ExpectedTensor, check_scales
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec

_CODES = ".qweight"
_SCALES = ".scales"
_ZEROS = ".qzeros"
_GROUPS = ".g_idx"
WORD = 32
"""Bits of a stored number, which packs several codes."""


@dataclasses.dataclass(frozen=True)
class PackedFormat:
    """The form of codes; subclasses are formats that a config.json names."""

    bits: int = 4
    group: int = 128
    """Inputs of a group; -1 for all."""
    offset: int = 0
    """Number that is added to stored zeros, modulo 2**bits as in kernels of GPTQ."""

    packed_dim: ClassVar[int]
    """Dim of [I, O] along which `qweight` packs codes."""
    has_group_ids: ClassVar[bool]
    """True where `g_idx` may name the group of each input; else all groups have the same size."""
    rounds_weights: ClassVar[bool]
    """True where weights are rounded to the dtype of their scales."""

    @property
    def per_word(self) -> int:
        """Number of codes in a stored number."""
        return WORD // self.bits

    @property
    def shifts(self) -> np.ndarray:
        """Lowest bit of each of the consecutive codes in a stored number, uint32."""
        return np.arange(0, WORD, self.bits, dtype="uint32")

    def group_size(self, num_inputs: int) -> int:
        """Return the inputs of a group in a matrix with so many."""
        if self.group == -1:
            return num_inputs
        return self.group

    def unpack(self, words: np.ndarray, dim: int) -> np.ndarray:
        """Unpack stored numbers [n, m] to int32 codes: [n * per_word, m] with dim 0, [n, m * per_word] with dim 1."""
        codes = words.view("uint32")[:, :, None] >> self.shifts & np.uint32((1 << self.bits) - 1)
        if dim == 0:
            codes = codes.transpose(0, 2, 1).reshape(-1, words.shape[1])
        else:
            codes = codes.reshape(len(words), -1)
        return codes.astype("int32")


class PackedTensors:
    """Tensors of a directory; matrices with codes are read as float32 [O, I]."""

    def __init__(self, files: TensorFiles, form: PackedFormat):
        """Raises UserError when a matrix lacks a tensor, or they do not fit."""
        self._files = files
        self.form = form
        self._stored_names = set(files.names)
        self._packed = {name.removesuffix(_CODES) for name in self._stored_names if name.endswith(_CODES)}
        others = [_SCALES, _ZEROS]
        if form.has_group_ids:
            others.append(_GROUPS)
        parts = {name + part for name in self._packed for part in others}
        self._names = [
            f"{name.removesuffix(_CODES)}.weight" if name.endswith(_CODES) else name
            for name in files.names
            if name not in parts
        ]
        for name in sorted(self._packed):
            self._check(name)

    def _check(self, layer: str) -> None:
        where = self._files.directory
        missing = [part for part in (_SCALES, _ZEROS) if layer + part not in self._stored_names]
        if missing:
            raise UserError(f"{where}: {layer}{_CODES} has no {layer}{missing[0]}")
        ExpectedTensor(WORDS, (None, None)).check(self._files.spec(layer + _CODES), where, "a matrix of codes")
        num_outputs, num_inputs = self._shape(layer)
        per_word = self.form.per_word
        size = self.form.group_size(num_inputs)
        if num_outputs % per_word:
            raise UserError(f"{where}: {layer}{_CODES} has {num_outputs} outputs, which are no multiple of {per_word}")
        if num_inputs % size and not self.form.has_group_ids:
            raise UserError(f"{where}: {layer}{_CODES} has {num_inputs} inputs, which are no multiple of {size}")
        groups = self._num_groups(num_inputs)
        expected = {
            _SCALES: ExpectedTensor(FLOATS, (groups, num_outputs)),
            _ZEROS: ExpectedTensor(WORDS, (groups, num_outputs // per_word)),
        }
        if self._has_group_ids(layer):
            expected[_GROUPS] = ExpectedTensor(INDEXES, (num_inputs,))
        why = f"codes of [{num_outputs}, {num_inputs}] in groups of {self.form.group}"
        for part, tensor in expected.items():
            tensor.check(self._files.spec(layer + part), where, why)

    def _has_group_ids(self, layer: str) -> bool:
        return self.form.has_group_ids and layer + _GROUPS in self._stored_names

    def _num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // self.form.group_size(num_inputs))

    def _shape(self, layer: str) -> tuple[int, int]:
        shape = list(self._files.spec(layer + _CODES).shape)
        shape[self.form.packed_dim] *= self.form.per_word
        num_inputs, num_outputs = shape
        return num_outputs, num_inputs

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
        form = self.form
        outputs, inputs = (slice(*s.indices(n)[:2]) for s, n in zip(index or [slice(None)] * 2, self._shape(layer)))
        groups = self._groups(layer, inputs)
        used = slice(int(groups.min()), int(groups.max()) + 1)
        own = groups - used.start
        codes = self._codes(layer + _CODES, (inputs, outputs), form.packed_dim)
        zeros = self._codes(layer + _ZEROS, (used, outputs), 1)
        if form.offset:
            zeros = (zeros + form.offset) & ((1 << form.bits) - 1)
        scales = self._files.read(layer + _SCALES, [used, outputs])
        check_scales(scales, layer + _SCALES, self._files.stored(layer + _SCALES).path)
        # the product of a few bits and a float16 is exact in float32
        weight = (codes - zeros[own]).astype("float32") * scales.astype("float32")[own]
        if form.rounds_weights:
            weight = weight.astype(scales.dtype)
        return np.ascontiguousarray(weight.T.astype("float32"))

    def _codes(self, name: str, index: tuple[slice, slice], dim: int) -> np.ndarray:
        """Read a slice of the codes of a tensor that is packed along `dim`."""
        per_word = self.form.per_word
        wanted = index[dim]
        words = list(index)
        words[dim] = slice(wanted.start // per_word, -(-wanted.stop // per_word))
        codes = self.form.unpack(self._files.read(name, words), dim)
        inside = slice(wanted.start - words[dim].start * per_word, wanted.stop - words[dim].start * per_word)
        if dim == 0:
            return codes[inside]
        return codes[:, inside]

    def _groups(self, layer: str, inputs: slice) -> np.ndarray:
        """Return the group of each of some inputs."""
        num_inputs = self._shape(layer)[1]
        if not self._has_group_ids(layer):
            return np.arange(inputs.start, inputs.stop) // self.form.group_size(num_inputs)
        found = self._files.read(layer + _GROUPS, [inputs])
        num_groups = self._num_groups(num_inputs)
        if not ((found >= 0) & (found < num_groups)).all():
            raise UserError(f"{self._files.directory}: {layer}{_GROUPS} names groups beyond the {num_groups} there are")
        return found
