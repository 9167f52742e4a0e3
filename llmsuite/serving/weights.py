"""The weights of a rollout server, which its trainer replaces while the server runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import MANIFEST, broken_file, sha256_of
from llmsuite.base.safe_files import is_file
from llmsuite.base.typing import Tensor
from llmsuite.checkpoint.finite import first_nonfinite
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.load import parameter_shapes
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.models.head import NO_KEYS

_IGNORED_KEYS = (*NO_KEYS, "num_nextn_predict_layers")
"""Fields of a config that do not change the outputs of the served model."""


class ServedWeights:
    """A served model with the version of its weights. Only one thread uses it at a time."""

    def __init__(self, model: RefreshableModel, families: Mapping[str, ModelFamily]):
        """
        Args:
            model: has the weights the server was started with.
            families: known model families.
        """
        self._model = model
        self._families = families
        self.version: int | None = None
        """The version set by the trainer; None for the weights the server was started with."""
        self.digest: str | None = None
        """sha256 of the manifest of the directory of the weights."""
        self.is_complete = True
        """False from the first tensor of an update until its last one."""

    @property
    def version_info(self) -> dict[str, Any]:
        """Keys of every answer that name the weights."""
        return {"weights_version": self.version, "weights_digest": self.digest}

    def open_checked(self, directory: Path, digest: str) -> ModelDirectory:
        """Open the model in a directory, and check it against its manifest and the served model.

        Args:
            directory: written as `llmsuite.base.files.committed_directory` does.
            digest: sha256 of its manifest.json, which has those of all other files.

        Returns:
            The model.

        Raises:
            UserError: the digest differs, a file is damaged, it is another model, or a value is not finite. Nothing was
                changed.
        """
        if not is_file(directory / MANIFEST):
            raise UserError(f"{directory}: has no {MANIFEST}; give a directory that this server can read too")
        if (found := sha256_of(directory / MANIFEST)) != digest:
            raise UserError(f"{directory}: the sha256 of its {MANIFEST} is {found}, not the given digest {digest}")
        if fault := broken_file(directory):
            raise UserError(fault)
        source = open_model(directory, self._families)
        theirs = _shape_keys(source.config)
        ours = _shape_keys(self._model.model.config)
        if type(source.config) is not type(self._model.model.config) or theirs != ours:
            differing = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
            keys = ", ".join(f"{key} {theirs.get(key)} instead of {ours.get(key)}" for key in differing)
            raise UserError(f"{directory}: is not the model that is served: {keys or 'of another family'}")
        shapes = parameter_shapes(source.family, source.config)
        check_shapes(source, shapes)
        if fault := first_nonfinite(source.files.paths):
            raise UserError(fault)
        if missing := self._model.names ^ shapes.keys():
            raise UserError(f"{directory}: other parameters than those of the model that is served: {sorted(missing)}")
        return source

    def update(self, source: ModelDirectory, version: int, digest: str) -> None:
        """Replace the weights by those of `open_checked`. If this raises, they are a mixture, and `is_complete` is
        False."""
        self.is_complete = False
        self._model.refresh(_values(source, self._model.names))
        self.version = version
        self.digest = digest
        self.is_complete = True


def _shape_keys(config: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if key not in _IGNORED_KEYS}


def _values(source: ModelDirectory, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model directory."""
    for name in source.names:
        if name in names:
            yield name, tensor_of(np.ascontiguousarray(source.read(name), "float32"))
