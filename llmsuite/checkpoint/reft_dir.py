"""A directory of interventions on hidden states (ReFT), and the model that they belong to.

    reft_config.json         rank, layers and positions, in the words of the section `reft`
    reft.safetensors         their parameters, by our names
    base.json                path and sha256 of the model they were trained on, see `adapter_dir.py`

HF PEFT does not read them; PaddleNLP's are pickles, see `llmsuite.convert.paddlenlp_reft`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.adapter_base import Base, read_base, write_base
from llmsuite.checkpoint.parts import FLOATS, Part
from llmsuite.checkpoint.tensor_writer import ManifestPart, write_file
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.errors import UserError
from llmsuite.files import read_json_object, write_json
from llmsuite.strict_json import check_kinds, list_of, whole

CONFIG = "reft_config.json"
STEM = "reft"
_COUNT = whole(0, 1 << 30)
_KINDS = {"rank": whole(1, 1 << 20), "layers": list_of(_COUNT), "first": _COUNT, "last": _COUNT}
"""Keys of the configuration."""


@dataclasses.dataclass(frozen=True)
class Interventions:
    """The interventions of a model, without their values."""

    rank: int
    layers: tuple[int, ...]
    """Numbers of the layers that have one."""
    ends: tuple[int, int]
    """How many of the first and of the last tokens of a prompt are edited."""
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
        directory: where to; the caller commits it.
        interventions: which ones.
        read: values of a parameter by our name. Each is read once, in the order of `specs`.
        specs: name, shape and dtype of every parameter, in order.
        tokenizer: directory whose tokenizer files are copied along.
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

    told: Interventions
    files: TensorSource

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError unless they are those of a model, by the shapes of its interventions by name."""
        own = {name: self.files.spec(name).shape for name in self.files.names}
        if own != dict(shapes):
            differing = [name for name in sorted({*own, *shapes}) if own.get(name) != shapes.get(name)]
            raise UserError(
                f"{self.files.paths[0].parent}: its interventions are of another model: {differing[0]} is "
                f"{own.get(differing[0], 'missing')}, and {shapes.get(differing[0], 'nothing')} in the model"
            )


def open_interventions(directory: Path) -> SavedInterventions:
    """Open what `write_interventions` has written. Raises UserError when it is not that."""
    data, base = read_json_object(directory / CONFIG), read_base(directory)
    check_kinds(directory / CONFIG, data, _KINDS)
    ends = data["first"], data["last"]
    told = Interventions(data["rank"], tuple(data["layers"]), ends, base or Base(None, ""))
    files = TensorFiles(directory, STEM)
    for name in files.names:
        Part(FLOATS).check(files.spec(name), directory)
    return SavedInterventions(told, files)


def orthonormal(matrix: np.ndarray) -> np.ndarray:
    """As `llmsuite.models.reft.orthonormal`."""
    q, r = np.linalg.qr(matrix.astype("float64"))
    found: np.ndarray = (q * np.sign(np.diag(r))).astype("float32")
    return found
