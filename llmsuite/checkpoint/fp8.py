"""Reads, a slice at a time, and writes models with FP8 matrices, as DeepSeek-V3 and Qwen3-FP8 are published.

config.json               `quantization_config` {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                          "activation_scheme": "dynamic"}
NAME.weight               the codes, e4m3 without infinities (Micikevicius et al. 2022, arXiv 2209.05433)
NAME.weight_scale_inv     float32, one for each block of NAME.weight, blocks at the edges are smaller: the weight is
                          code times this (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), in spite of the name
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.expected_tensor import FLOATS, ExpectedTensor, check_scales
from llmsuite.checkpoint.stored import FP8, StoredTensor
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec
from llmsuite.contract.specs import ModelFamily

_SCALE = "_scale_inv"
_BF16_MATRICES = ("eh_proj",)
"""Matrices of decoder layers that are published in bfloat16."""
_MAX_CODE = np.float32(448)
"""Largest value of e4m3fn."""
_VALUES = np.arange(256, dtype="uint8").view(FP8).astype("float32")
"""Value of each code."""


@dataclasses.dataclass(frozen=True)
class Fp8Format:
    """Size of the blocks of a matrix with one scale each."""

    rows: int = 128
    columns: int = 128
    """Size of a block along the inputs: a matrix is stored as [outputs, inputs]."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Fp8Format | None:
        """Return the format that a config.json names; None for a model without FP8.

        Raises:
            UserError: it is FP8 of another kind.
        """
        found = data.get("quantization_config")
        if not isinstance(found, Mapping) or found.get("quant_method") != "fp8":
            return None
        block = found.get("weight_block_size")
        if found.get("fmt", "e4m3") != "e4m3":
            raise UserError(f"config.json: quantization_config.fmt is {found['fmt']!r}; of FP8 formats, e4m3 is read")
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise UserError(
                f"config.json: quantization_config.weight_block_size is {block!r}; FP8 is read with a scale for each "
                "block of [rows, columns], such as [128, 128]"
            )
        return cls(*block)

    def to_hf(self) -> dict[str, Any]:
        """Return the `quantization_config` of a config.json."""
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [self.rows, self.columns],
        }

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def block_numbers(self, dim: int, first: int, last: int) -> np.ndarray:
        """Return the number of the block of each row (dim 0) or column (dim 1) from `first` to `last`."""
        return np.arange(first, last) // (self.rows, self.columns)[dim]


class Fp8Tensors:
    """Tensors of a directory; those in FP8 are read as float32."""

    def __init__(self, files: TensorFiles, form: Fp8Format):
        """Raises UserError when a matrix in FP8 has no scales, or they do not fit."""
        self._files = files
        self.form = form
        names = set(files.names)
        self._quantised = {name for name in names if f"{name}{_SCALE}" in names}
        scales = {f"{name}{_SCALE}" for name in self._quantised}
        self._names = [name for name in files.names if name not in scales]
        for name in self._names:
            matrix = files.stored(name)
            if name not in self._quantised:
                if matrix.dtype == FP8:
                    raise UserError(f"{matrix.path}: {name!r} is in FP8, and there is no {name}{_SCALE}")
                continue
            if matrix.dtype != FP8 or len(matrix.shape) != 2:
                raise UserError(f"{matrix.path}: {name!r} has scales, but is no matrix in FP8")
            why = f"a matrix of {list(matrix.shape)} in blocks of {form.rows} x {form.columns}"
            ExpectedTensor(FLOATS, form.scale_shape(matrix.shape)).check(files.spec(scale_name(name)), matrix.path, why)

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def paths(self) -> list[Path]:
        return self._files.paths

    def spec(self, name: str) -> TensorSpec:
        spec = self._files.spec(name)
        if name in self._quantised:
            return dataclasses.replace(spec, dtype="float32")
        return spec

    def is_quantised(self, name: str) -> bool:
        return name in self._quantised

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor in its file, without conversion."""
        return self._files.stored(name)

    def stored_scales(self, name: str) -> StoredTensor:
        """Return the scales of a matrix in FP8 in their file."""
        return self._files.stored(scale_name(name))

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read a tensor, or a slice of it (one slice a dim). Only the slice of a matrix in FP8 is held as float32."""
        value = self._files.read(name, index)
        if name not in self._quantised:
            return value
        shape = self._files.spec(name).shape
        bounds = [s.indices(size)[:2] for s, size in zip(index or [slice(None)] * 2, shape)]
        rows, columns = (self.form.block_numbers(dim, *bound) for dim, bound in enumerate(bounds))
        blocks = [slice(int(numbers[0]), int(numbers[-1]) + 1) for numbers in (rows, columns)]
        of_scales = scale_name(name)
        scales = check_scales(self._files.read(of_scales, blocks), of_scales, self._files.stored(of_scales).path)
        return dequantise(value, scales, rows - rows[0], columns - columns[0])


def scale_name(name: str) -> str:
    """Return the name of the tensor with the scales of a matrix."""
    return f"{name}{_SCALE}"


def dequantise(codes: np.ndarray, scales: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Convert codes to float32, a row of blocks at a time.

    Args:
        codes: [R, C], e4m3fn.
        scales: [row blocks, column blocks], float32.
        rows: [R], ascending: the row block of each row.
        columns: [C], the column block of each column.

    Returns:
        [R, C], float32.
    """
    result = np.empty(codes.shape, "float32")
    for first, last in _runs(rows):
        band = result[first:last]
        np.take(_VALUES, codes[first:last].view("uint8"), out=band, mode="clip")
        band *= scales[rows[first]][columns]
    return result


def quantise(value: np.ndarray, scales: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Round float32 values [R, C] to the nearest codes; the other arguments are those of `dequantise`."""
    result = np.empty(value.shape, FP8)
    for first, last in _runs(rows):
        result[first:last] = (value[first:last] / scales[rows[first]][columns]).astype(FP8)
    return result


def block_scales(value: np.ndarray, form: Fp8Format) -> np.ndarray:
    """Return the scales of a float32 matrix: the largest magnitude of a block becomes the largest code, 448.

    Values that were dequantised from FP8 get exactly the scale that they had: where the division rounds to a
    neighbouring float, the neighbour that leaves all values of the block unchanged is taken. So a copy of an FP8 model
    has the same bits.
    """
    rows, columns = (form.block_numbers(dim, 0, size) for dim, size in enumerate(value.shape))
    edges = np.arange(0, value.shape[1], form.columns)
    result = np.empty(form.scale_shape(value.shape), "float32")
    for number, (first, last) in enumerate(_runs(rows)):
        band = value[first:last]
        largest = np.maximum.reduceat(np.abs(band).max(0), edges)
        # a block of zeros gets the scale 1: 0 / 0 would be NaN
        scales = np.where(largest > 0, largest / _MAX_CODE, np.float32(1)).astype("float32")
        neighbours = [scales, np.nextafter(scales, np.float32(np.inf)), np.nextafter(scales, np.float32(0))]
        # the first row is enough to exclude most blocks, which do not come from FP8
        likely = [scale for scale in neighbours if _unchanged(band[:1], scale, columns, edges).any()]
        exact = np.zeros(len(edges), bool)
        for scale in likely:
            fits = _unchanged(band, scale, columns, edges) & ~exact
            scales = np.where(fits, scale, scales)
            exact = exact | fits
        result[number] = scales
    return result


def _unchanged(band: np.ndarray, scales: np.ndarray, columns: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return a mask of the blocks in a row of blocks that FP8 with these scales leaves unchanged."""
    scale = scales[columns]
    found = (band / scale).astype(FP8).astype("float32") * scale
    return np.logical_and.reduceat((found == band).all(0), edges)


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Return the bounds [first, last) of each run of equal values in ascending numbers."""
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return list(itertools.pairwise(edges))


class Fp8Writer:
    """Tensors of an HF layout to be written: matrices of the decoder layers in FP8, all others in bfloat16."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        matrices: set[str],
        read: Callable[[str, Sequence[slice] | None], np.ndarray],
        form: Fp8Format,
    ):
        """
        Args:
            specs: every tensor before quantisation, in the order and orientation of the file.
            matrices: names of those that become FP8.
            read: returns values in the orientation of the file.
            form: the blocks.
        """
        self.form = form
        self._read = read
        self._matrices = matrices
        self._shapes = {spec.name: spec.shape for spec in specs if spec.name in matrices}
        self._scales: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        self.specs: list[TensorSpec] = []
        for spec in specs:
            if spec.name in matrices:
                self.specs.append(dataclasses.replace(spec, dtype=FP8))
                self.specs.append(TensorSpec(scale_name(spec.name), form.scale_shape(spec.shape), "float32"))
            else:
                self.specs.append(spec)

    def matrix_of(self, name: str) -> str | None:
        """Return the matrix whose scales a tensor has; None for other tensors."""
        matrix = name.removesuffix(_SCALE)
        if matrix != name and matrix in self._matrices:
            return matrix
        return None

    def scales(self, matrix: str) -> np.ndarray:
        """Return the scales of a matrix, which is read a band of rows at a time."""
        with self._lock:
            found = self._scales.get(matrix)
        if found is None:
            num_rows, num_columns = self._shapes[matrix]
            step = self.form.rows * max(1, (1 << 20) // (self.form.rows * num_columns))
            bands = [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
            found = np.concatenate([self._scales_of(matrix, [band, slice(0, num_columns)]) for band in bands])
            with self._lock:
                self._scales[matrix] = found
        return found

    def _scales_of(self, matrix: str, index: Sequence[slice]) -> np.ndarray:
        return block_scales(self._read(matrix, index).astype("float32", copy=False), self.form)

    def codes(self, matrix: str, index: Sequence[slice] | None) -> np.ndarray:
        """Return the codes of some rows of a matrix, or of all."""
        num_rows, num_columns = self._shapes[matrix]
        first, last, _ = index[0].indices(num_rows) if index else (0, num_rows, 1)
        rows = self.form.block_numbers(0, first, last)
        columns = self.form.block_numbers(1, 0, num_columns)
        value = self._read(matrix, index).astype("float32", copy=False)
        return quantise(value, self.scales(matrix), rows, columns)


def is_fp8_matrix(parameter: str, family: ModelFamily) -> bool:
    """Return True for a matrix that is published in FP8: those of the decoder layers, except router gates."""
    plan = family.shard_plan
    module = parameter.rpartition(".")[0]
    if (
        plan is None
        or not plan.layers
        or not parameter.startswith(f"{plan.layers}.")
        or module.endswith(_BF16_MATRICES)
    ):
        return False
    return bool(family.names().is_linear(parameter)) and not (plan.gates and fnmatch.fnmatchcase(module, plan.gates))
