"""A directory of interventions on hidden states (ReFT), and the model that they belong to.

    reft_config.json         rank, layers and positions, in the words of the section `reft`
    reft.safetensors         their parameters, by our names
    base.json                path and sha256 of the model they were trained on, see `adapter_dir.py`

Neither HF PEFT nor PaddleNLP reads them; pyreft and PaddleNLP write pickles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.adapter_dir import BASE, Base, read_base
from llmsuite.checkpoint.model_writer import copy_tokenizer
from llmsuite.checkpoint.tensor_writer import ManifestPart, write_file
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSpec
from llmsuite.errors import UserError
from llmsuite.files import read_json_file, write_json

CONFIG = "reft_config.json"
STEM = "reft"


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
    write_json(directory / BASE, interventions.base.to_json())
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


@dataclasses.dataclass(frozen=True)
class SavedInterventions:
    """Interventions in a directory."""

    told: Interventions
    files: TensorFiles


def open_interventions(directory: Path) -> SavedInterventions:
    """Open what `write_interventions` has written. Raises UserError when it is not that."""
    data, base = read_json_file(directory / CONFIG), read_base(directory)
    try:
        told = Interventions(
            int(data["rank"]), tuple(data["layers"]), (data["first"], data["last"]), base or Base(None, "")
        )
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{directory / CONFIG}: has not rank, layers, first and last: {error!r}") from error
    return SavedInterventions(told, TensorFiles(directory, STEM))
