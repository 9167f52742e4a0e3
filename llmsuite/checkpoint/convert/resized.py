"""A model with a larger vocabulary, whose embedding and head an adapter provides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tensors import TensorSource, TensorSpec, sliced
from llmsuite.models.head import EMBEDDING, OUTPUT


def with_vocabulary(base: ModelDirectory, rows: int) -> ModelDirectory:
    """The model with this number of rows of embedding and head; those that its files do not have are zeros."""
    dims = {EMBEDDING: 0, OUTPUT: 0 if base.linears_transposed else 1}
    resized = {base.tensors[name].names[0]: dim for name, dim in dims.items() if name in base.tensors}
    config = dataclasses.replace(base.config, vocab_size=rows)
    return dataclasses.replace(base, config=config, files=_Resized(base.files, resized, rows), tied_copy=None)


@dataclasses.dataclass(frozen=True)
class _Resized:
    """Tensors of a model, of which some have more rows, or columns, of zeros."""

    files: TensorSource
    dims: Mapping[str, int]
    """The dim that is larger, by the name of the tensor."""
    rows: int

    @property
    def names(self) -> list[str]:
        return self.files.names

    @property
    def paths(self) -> list[Path]:
        return self.files.paths

    def spec(self, name: str) -> TensorSpec:
        found = self.files.spec(name)
        if name not in self.dims:
            return found
        shape = list(found.shape)
        shape[self.dims[name]] = self.rows
        return dataclasses.replace(found, shape=tuple(shape))

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name not in self.dims:
            return self.files.read(name, index)
        value = self.files.read(name)
        before = [(0, size - stored) for size, stored in zip(self.spec(name).shape, value.shape)]
        return sliced(np.pad(value, before), index)
