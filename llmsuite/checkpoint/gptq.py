"""Reads models with 4 or 8 bit matrices in the layout of GPTQ checkpoints.

config.json     `quantization_config` {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": true, …}
NAME.qweight    int32, [I * bits / 32, O]: codes of consecutive inputs, the first one in the lowest bits
NAME.scales     float16, [groups, O]: the step between codes
NAME.qzeros     int32, [groups, O * bits / 32]: the code of 0 of consecutive outputs, minus 1 (not where
                `checkpoint_format` is gptq_v2)
NAME.g_idx      int32, [I]: the group of each input; without it, group_size inputs follow each other

The weight is (code - zero) * scale. The layout is AutoGPTQ's (its `nn_modules/qlinear/qlinear_cuda_old.py`). It is read
as float32, a slice at a time.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.expected_tensor import FLOATS, INDEXES, WORDS, ExpectedTensor, check_scales
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec

_CODES = ".qweight"
_SCALES = ".scales"
_ZEROS = ".qzeros"
_GROUPS = ".g_idx"
_WORD = 32
"""Bits of a stored number, which packs several codes."""


@dataclasses.dataclass(frozen=True)
class GptqFormat:
    """Bits of a code, and number of inputs that share a scale."""

    bits: int = 4
    group: int = 64
    """Inputs of a group; -1 for all."""
    offset: int = 1
    """Number that is added to stored zeros."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GptqFormat | None:
        """Return the format that a config.json names; None for a model without GPTQ.

        Raises:
            UserError: it is GPTQ of another kind.
        """
        found = data.get("quantization_config")
        if not isinstance(found, Mapping) or found.get("quant_method") != "gptq":
            return None
        bits, group, version = (found.get(key) for key in ("bits", "group_size", "checkpoint_format"))
        if type(bits) is not int or bits not in (4, 8):
            raise UserError(f"config.json: quantization_config.bits is {bits!r}; GPTQ is read with 4 or 8")
        if type(group) is not int or (group < 1 and group != -1):
            raise UserError(
                f"config.json: quantization_config.group_size is {group!r}; it is a number of inputs, or -1 for all"
            )
        if version not in (None, "gptq", "gptq_v2"):
            raise UserError(
                f"config.json: quantization_config.checkpoint_format is {version!r}; GPTQ is read as gptq or gptq_v2"
            )
        return cls(bits, group, 0 if version == "gptq_v2" else 1)

    def to_hf(self) -> dict[str, Any]:
        """Return the `quantization_config` of a config.json."""
        return {
            "bits": self.bits,
            "checkpoint_format": "gptq" if self.offset else "gptq_v2",
            "desc_act": False,
            "group_size": self.group,
            "lm_head": False,
            "quant_method": "gptq",
            "sym": True,
        }

    @property
    def per_word(self) -> int:
        """Number of codes in a stored number."""
        return _WORD // self.bits


class GptqTensors:
    """Tensors of a directory; matrices with codes are read as float32 [O, I]."""

    def __init__(self, files: TensorFiles, form: GptqFormat):
        """Raises UserError when a matrix lacks a tensor, or they do not fit."""
        self._files = files
        self.form = form
        self._stored_names = set(files.names)
        self._packed = {name.removesuffix(_CODES) for name in self._stored_names if name.endswith(_CODES)}
        parts = {f"{name}{part}" for name in self._packed for part in (_SCALES, _ZEROS, _GROUPS)}
        self._names = [
            f"{name.removesuffix(_CODES)}.weight" if name.endswith(_CODES) else name
            for name in files.names
            if name not in parts
        ]
        for name in sorted(self._packed):
            self._check(name)

    def _check(self, layer: str) -> None:
        missing = [part for part in (_SCALES, _ZEROS) if layer + part not in self._stored_names]
        if missing:
            raise UserError(f"{self._files.directory}: {layer}{_CODES} has no {layer}{missing[0]}")
        where = self._files.directory
        per_word = self.form.per_word
        ExpectedTensor(WORDS, (None, None)).check(self._files.spec(layer + _CODES), where, "a matrix of codes")
        num_outputs, num_inputs = self._shape(layer)
        if num_outputs % per_word:
            raise UserError(f"{where}: {layer}{_CODES} has {num_outputs} outputs, which are no multiple of {per_word}")
        groups = self._num_groups(num_inputs)
        expected = {
            _SCALES: ExpectedTensor(FLOATS, (groups, num_outputs)),
            _ZEROS: ExpectedTensor(WORDS, (groups, num_outputs // per_word)),
            _GROUPS: ExpectedTensor(INDEXES, (num_inputs,)),
        }
        why = f"codes of [{num_outputs}, {num_inputs}] in groups of {self.form.group}"
        for part, tensor in expected.items():
            if layer + part in self._stored_names:
                tensor.check(self._files.spec(layer + part), where, why)

    def _num_groups(self, num_inputs: int) -> int:
        if self.form.group == -1:
            return 1
        return -(-num_inputs // self.form.group)

    def _shape(self, layer: str) -> tuple[int, int]:
        words, num_outputs = self._files.spec(layer + _CODES).shape
        return num_outputs, words * self.form.per_word

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
        form = self.form
        if layer not in self._packed:
            return self._files.read(name, index)
        shape = self._shape(layer)
        (first, last), (begin, end) = (s.indices(n)[:2] for s, n in zip(index or [slice(None)] * 2, shape))
        columns = slice(first, last)
        rows = _words(begin, end, form)
        per_word = form.per_word
        codes = unpacked(self._files.read(layer + _CODES, [rows, columns]), form)
        codes = codes[begin - rows.start * per_word : end - rows.start * per_word]
        groups = self._groups(layer, begin, end)
        used = slice(int(groups.min()), int(groups.max()) + 1)
        scales = self._files.read(layer + _SCALES, [used, columns])
        scales = check_scales(scales, layer + _SCALES, self._files.stored(layer + _SCALES).path)
        words = _words(first, last, form)
        zeros = unpacked(self._files.read(layer + _ZEROS, [used, words]).T, form).T
        zeros = zeros[:, first - words.start * per_word : last - words.start * per_word]
        # GPTQ kernels add the offset modulo 2**bits
        zeros = (zeros + form.offset) & ((1 << form.bits) - 1) if form.offset else zeros
        own = groups - used.start
        return np.ascontiguousarray(((codes - zeros[own]).astype("float32") * scales[own]).T)

    def _groups(self, layer: str, begin: int, end: int) -> np.ndarray:
        if layer + _GROUPS in self._stored_names:
            found = self._files.read(layer + _GROUPS, [slice(begin, end)])
            num_groups = self._num_groups(self._shape(layer)[1])
            if not ((found >= 0) & (found < num_groups)).all():
                raise UserError(
                    f"{self._files.directory}: {layer}{_GROUPS} names groups beyond the {num_groups} there are"
                )
            return found
        return np.arange(begin, end) // (self.form.group if self.form.group > 0 else end)


def _words(first: int, last: int, form: GptqFormat) -> slice:
    """Return the slice of stored numbers with the codes from `first` up to `last`."""
    return slice(first // form.per_word, -(-last // form.per_word))


def unpacked(words: np.ndarray, form: GptqFormat) -> np.ndarray:
    """Unpack stored numbers [n, m] to codes [n * per_word, m] int32."""
    shifts = np.arange(0, _WORD, form.bits, dtype="uint32")[:, None]
    codes = words.view("uint32")[:, None] >> shifts & np.uint32((1 << form.bits) - 1)
    return codes.reshape(-1, words.shape[1]).astype("int32")


def packed(codes: np.ndarray, form: GptqFormat) -> np.ndarray:
    """Pack codes [n * per_word, m] into stored numbers [n, m] int32."""
    shifts = np.arange(0, _WORD, form.bits, dtype="uint32")[:, None]
    words = codes.astype("uint32").reshape(-1, form.per_word, codes.shape[1]) << shifts
    return np.asarray(np.bitwise_or.reduce(words, 1).view("int32"))
