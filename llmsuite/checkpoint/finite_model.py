"""The values of a model that are NaN or infinite, and the file that has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.finite import NonFiniteError, OnNonFinite, count_nonfinite, told
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tensors import TensorFiles, TensorSource


class FiniteModel(ModelDirectory):
    """A model whose parameters are looked at as they are read, for what is made of them.

    `read` raises NonFiniteError for values that are not finite.
    """

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        value = super().read(name, index)
        refuse = nonfinite_of(self, lambda name: [name])
        if refuse is not None and (count := count_nonfinite(value)):
            refuse(name, count, value.size)
        return value


def checked(model: ModelDirectory) -> ModelDirectory:
    """A model as `FiniteModel`, unless it may have values that are not finite."""
    if model.allow_nonfinite:
        return model
    return FiniteModel(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})


def nonfinite_of(model: ModelDirectory, parameters: Callable[[str], Sequence[str]]) -> OnNonFinite | None:
    """What refuses tensors made of a model that are not finite, with the file that has the values; of an adapter, with
    the tensor there. None for a model that may have such.

    Args:
        model: says which.
        parameters: gives our names of the parameters that a tensor is made of.
    """
    if model.allow_nonfinite:
        return None

    def refuse(name: str, count: int, size: int) -> None:
        added: TensorSource | None = getattr(model.files, "added", None)
        what = None if added is None else _first(added, model.adapter)
        if what is not None:
            raise NonFiniteError(f"{what}, so {name!r} would have {count:,}")
        first = next((model.tensors[one].names[0] for one in parameters(name) if one in model.tensors), "")
        raise NonFiniteError(told(_place(model.path, model.files, first), name, count, size))

    return refuse


def _first(files: TensorSource, directory: Path | None) -> str | None:
    """What `told` says of the first tensor that has such values; None where none has."""
    for name in files.names:
        value = files.read(name)
        if count := count_nonfinite(value):
            return told(_place(directory, files, name), name, count, value.size)
    return None


def _place(directory: Path | None, files: TensorSource, name: str) -> Path | str:
    """The file that has a tensor, as far as that is known."""
    if isinstance(files, TensorFiles) and name in files.names:
        return files.stored(name).path
    return files.paths[0] if len(files.paths) == 1 else directory or "the weights"
