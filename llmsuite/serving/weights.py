"""The weights of a server whose trainer replaces them while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.checkpoint.finite import first_nonfinite
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.errors import UserError
from llmsuite.files import MANIFEST, broken_file, sha256_of
from llmsuite.inference.load import parameter_shapes
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.models.head import NO_KEYS
from llmsuite.regular import is_file
from llmsuite.specs import ModelFamily
from llmsuite.typing import Tensor

_UNSEEN = (*NO_KEYS, "num_nextn_predict_layers")
"""Fields of a config that change nothing of what the model computes here."""


class ServedWeights:
    """A model that is served, and which weights it has. Only one thread at a time uses it."""

    def __init__(self, model: RefreshableModel, families: Mapping[str, ModelFamily]):
        """
        Args:
            model: has the weights the server was started with.
            families: known model families.
        """
        self._model, self._families = model, families
        self.version: int | None = None
        """The version that the trainer gave; None for the weights the server was started with."""
        self.digest: str | None = None
        """sha256 of the manifest of the directory they came from."""
        self.is_whole = True
        """False from the first tensor of an update until its last one."""

    @property
    def marks(self) -> dict[str, Any]:
        """What answers name."""
        return {"weights_version": self.version, "weights_digest": self.digest}

    def opened(self, directory: Path, digest: str) -> ModelDirectory:
        """The model in a directory, which has been compared with this one and with its own manifest.

        Args:
            directory: written as `llmsuite.files.committed_directory` does.
            digest: sha256 of its manifest.json, which has those of all other files.

        Raises:
            UserError: it is not what the trainer means, is damaged, is of another model, or has a value that is not
                finite. Nothing was changed.
        """
        if not is_file(directory / MANIFEST):
            raise UserError(f"{directory}: has no {MANIFEST}; give a directory that this server can read too")
        if (found := sha256_of(directory / MANIFEST)) != digest:
            raise UserError(f"{directory}: the sha256 of its {MANIFEST} is {found}, not the given digest {digest}")
        if fault := broken_file(directory):
            raise UserError(fault)
        source = open_model(directory, self._families)
        theirs, ours = _shape(source.config), _shape(self._model.model.config)
        if type(source.config) is not type(self._model.model.config) or theirs != ours:
            differing = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
            keys = ", ".join(f"{key} {theirs.get(key)} in place of {ours.get(key)}" for key in differing)
            raise UserError(f"{directory}: is another model than the one that is served: {keys or 'of another family'}")
        shapes = parameter_shapes(source.family, source.config)
        check_shapes(source, shapes)
        if fault := first_nonfinite(source.files.paths):
            raise UserError(fault)
        if missing := self._model.names ^ shapes.keys():
            raise UserError(f"{directory}: other parameters than those of the model that is served: {sorted(missing)}")
        return source

    def take(self, source: ModelDirectory, version: int, digest: str) -> None:
        """Replace the weights by those of `opened`. If this raises, they are a mixture: `is_whole` is False."""
        self.is_whole = False
        self._model.refresh(_values(source, self._model.names))
        self.version, self.digest, self.is_whole = version, digest, True


def _shape(config: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if key not in _UNSEEN}


def _values(source: ModelDirectory, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model directory, one after the other."""
    for name in source.names:
        if name in names:
            yield name, paddle.to_tensor(np.ascontiguousarray(source.read(name), "float32"))
