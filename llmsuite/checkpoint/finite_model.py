"""Finds NaN and infinite values of a model, and the file that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.fields import field_values
from llmsuite.checkpoint.finite import NonFiniteError, OnNonFinite, count_nonfinite, describe_nonfinite
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tensors import MergedSource, TensorFiles, TensorSource


class FiniteModel(ModelDirectory):
    """A model whose `read` raises NonFiniteError for values that are not finite."""

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        value = super().read(name, index)
        refuse = nonfinite_handler(self, lambda name: [name])
        count = 0 if refuse is None else count_nonfinite(value)
        if refuse is not None and count:
            refuse(name, count, value.size)
        return value


def with_finite_check(model: ModelDirectory) -> ModelDirectory:
    """Return a model as `FiniteModel`, unless it may have values that are not finite."""
    if model.allow_nonfinite:
        return model
    return FiniteModel(**field_values(model))


def nonfinite_handler(model: ModelDirectory, parameters: Callable[[str], Sequence[str]]) -> OnNonFinite | None:
    """Return an `OnNonFinite` for tensors made of a model; None for a model that may have values that are not finite.

    It raises NonFiniteError that names the file with the values, or the tensor of an adapter.

    Args:
        model: the source of the tensors.
        parameters: returns our names of the parameters that a tensor is made of.
    """
    if model.allow_nonfinite:
        return None

    def refuse(name: str, count: int, size: int) -> None:
        what = None
        if isinstance(model.files, MergedSource):
            what = _first_nonfinite(model.files.added, model.adapter)
        if what is not None:
            raise NonFiniteError(f"{what}, so {name!r} would have {count:,}")
        first = next((model.tensors[one].names[0] for one in parameters(name) if one in model.tensors), "")
        raise NonFiniteError(describe_nonfinite(_file_of(model.path, model.files, first), name, count, size))

    return refuse


def _first_nonfinite(files: TensorSource, directory: Path | None) -> str | None:
    """Return the message about the first tensor with values that are not finite; None if there is none."""
    for name in files.names:
        value = files.read(name)
        count = count_nonfinite(value)
        if count:
            return describe_nonfinite(_file_of(directory, files, name), name, count, value.size)
    return None


def _file_of(directory: Path | None, files: TensorSource, name: str) -> Path | str:
    """Return the file of a tensor, as far as it is known."""
    if isinstance(files, TensorFiles) and name in files.names:
        return files.stored(name).path
    if len(files.paths) == 1:
        return files.paths[0]
    return directory or "the weights"
