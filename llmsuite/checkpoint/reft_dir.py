"""A directory of interventions on hidden states (ReFT), and their base model.

    reft_config.json         rank, layers and positions, with the keys of the section `reft`
    reft.safetensors         their parameters, by our names
    base.json                path and sha256 of the base model, see `adapter_dir.py`

HF PEFT does not read them; PaddleNLP's are pickles, see `llmsuite.checkpoint.convert.paddlenlp_reft`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object, write_json
from llmsuite.base.strict_json import check_kinds, integer, list_of
from llmsuite.checkpoint.adapter_base import Base, read_base, write_base
from llmsuite.checkpoint.expected_tensor import FLOATS, ExpectedTensor
from llmsuite.checkpoint.tensor_writer import ManifestPart, write_file
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer

CONFIG = "reft_config.json"
STEM = "reft"
_COUNT = integer(0, 1 << 30)
_KINDS = {"rank": integer(1, 1 << 20), "layers": list_of(_COUNT), "first": _COUNT, "last": _COUNT}
"""Keys of the configuration."""


@dataclasses.dataclass(frozen=True)
class Interventions:
    """Interventions of a model, without their values."""

    rank: int
    layers: tuple[int, ...]
    """Numbers of the layers that have one."""
    ends: tuple[int, int]
    """Numbers of first and of last tokens of a prompt that are edited."""
    base: Base


def write_interventions(
    directory: Path,
    interventions: Interventions,
    read: Callable[[str], np.ndarray],
    specs: Sequence[TensorSpec],
    tokenizer: Path | None = None,
) -> ManifestPart:
    """Write interventions into an existing directory. Returns their entries of the manifest.

    Args:
        directory: target; the caller commits it.
        interventions: the interventions, without their values.
        read: returns the values of a parameter by our name. Each is read once, in the order of `specs`.
        specs: name, shape and dtype of every parameter, in order.
        tokenizer: directory whose tokenizer files are copied; None for none.
    """
    values = {spec.name: read(spec.name) for spec in specs}
    written = write_file(directory / f"{STEM}{SUFFIX}", specs, values.__getitem__, {"format": "llmsuite"})
    first, last = interventions.ends
    layers = list(interventions.layers)
    write_json(directory / CONFIG, {"rank": interventions.rank, "layers": layers, "first": first, "last": last})
    write_base(directory, interventions.base)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


@dataclasses.dataclass(frozen=True)
class SavedInterventions:
    """Interventions in a directory."""

    metadata: Interventions
    files: TensorSource

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless they fit a model, given the shapes of its interventions by name."""
        own = {name: self.files.spec(name).shape for name in self.files.names}
        if own != dict(shapes):
            differing = [name for name in sorted({*own, *shapes}) if own.get(name) != shapes.get(name)]
            raise UserError(
                f"{self.files.paths[0].parent}: its interventions are of another model: {differing[0]} is "
                f"{own.get(differing[0], 'missing')}, and {shapes.get(differing[0], 'nothing')} in the model"
            )


def open_interventions(directory: Path) -> SavedInterventions:
    """Open interventions that `write_interventions` has written. Raises UserError if the directory has others."""
    data = read_json_object(directory / CONFIG)
    base = read_base(directory)
    check_kinds(directory / CONFIG, data, _KINDS)
    ends = data["first"], data["last"]
    metadata = Interventions(data["rank"], tuple(data["layers"]), ends, base or Base(None, ""))
    files = TensorFiles(directory, STEM)
    for name in files.names:
        ExpectedTensor(FLOATS).check(files.spec(name), directory)
    return SavedInterventions(metadata, files)
