"""Reads and writes interventions on hidden states in PaddleNLP's layout (`paddlenlp.peft.ReFTModel`).

    config.json             layers, kind of the interventions, their rank, and `position`: which tokens are edited
    intkey_layer.N.bin      a pickle with the parameters of layer N's intervention

PaddleNLP's `LoreftIntervention` computes h + R (W^T h + b - R^T h) with an R [D, R] that is orthonormal only at the
start of training. With R = Q S, Q orthonormal, that is

    h + Q (W'^T h + b' - Q^T h)     for     W' = W S^T + Q (I - S S^T),  b' = S b

which is an intervention of `adapters.layers.reft`. Its `TinyIntervention`, h + h A diag(a) B diag(b), is one too: with
B diag(b) = (Q S)^T, W' = Q + A diag(a) S^T and b' = 0. Written is a `LoreftIntervention` with R = Q.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.reft_shapes import BIAS, MODULE, ROTATION, SOURCE, orthonormal
from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object, write_json
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.convert.paddle_save import write_pickle
from llmsuite.checkpoint.convert.pdparams import PickledTensors
from llmsuite.checkpoint.reft_dir import Interventions, SavedInterventions
from llmsuite.checkpoint.side_adapters import paddlenlp_reft_files
from llmsuite.checkpoint.tensors import InMemoryTensors
from llmsuite.contract.schema.reft import parse_positions

_CONFIG = "config.json"
_NUMBER = re.compile(r"intkey_layer\.(\d+)\.bin")
_LOREFT = "<class 'paddlenlp.peft.reft.interventions.LoreftIntervention'>"
_NAMES_OF_LOREFT = ("rotate_layer.weight", "learned_source.weight", "learned_source.bias")
_NAMES_OF_TINY = ("param_A", "param_B", "param_a", "param_b")
_LINEAR = (None, "linear")


def open_reft(directory: Path, layers: str, base: Base) -> SavedInterventions:
    """Open interventions that PaddleNLP has saved.

    Args:
        directory: of the interventions.
        layers: name of the list of the model's layers.
        base: their base model.

    Raises:
        UserError: they are of a kind that is not supported here, or the files are not those of PaddleNLP.
    """
    data = read_json_object(directory / _CONFIG)
    params = data.get("intervention_params")
    if not isinstance(params, dict):
        raise UserError(f"{directory / _CONFIG}: has no intervention_params; PaddleNLP's ReFTModel writes them")
    if params.get("act_fn") not in _LINEAR:
        raise UserError(
            f"{directory / _CONFIG}: act_fn is {params['act_fn']!r}; only linear interventions (LoReFT) are supported"
        )
    ends = _ends(directory, data.get("position"))
    values = {}
    ranks = set()
    paths = {int(match[1]): path for path in paddlenlp_reft_files(directory) if (match := _NUMBER.fullmatch(path.name))}
    for number, path in sorted(paths.items()):
        rotation, source, bias = _read(path)
        ranks.add(rotation.shape[1])
        for kind, value in ((ROTATION, rotation), (SOURCE, source), (BIAS, bias)):
            values[f"{layers}.{number}.{MODULE}.{kind}"] = value.astype("float32")
    if len(ranks) > 1:
        raise UserError(f"{directory}: its interventions have ranks {sorted(ranks)}; all layers need the same rank")
    metadata = Interventions(ranks.pop(), tuple(sorted(paths)), ends, base)
    return SavedInterventions(metadata, InMemoryTensors(values, list(paths.values())))


def _ends(directory: Path, position: Any) -> tuple[int, int]:
    try:
        return parse_positions(str(position))
    except ValueError as error:
        raise UserError(
            f"{directory / _CONFIG}: position is {position!r}; it has to give the tokens of a prompt that were edited "
            'in training, such as "f7+l7", the first and the last seven'
        ) from error


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotation Q, W' and b' of an intervention, in float64."""
    files = PickledTensors([path])
    found = {name: files.read(name).astype("float64") for name in files.names}
    if found.keys() == set(_NAMES_OF_LOREFT):
        rotation, source, bias = (found[name] for name in _NAMES_OF_LOREFT)
        fits = rotation.ndim == 2 and source.shape == rotation.shape and bias.shape == rotation.shape[1:]
    elif found.keys() == set(_NAMES_OF_TINY):
        first, second, inner, outer = (found[name] for name in _NAMES_OF_TINY)
        fits = first.ndim == second.ndim == 2 and first.shape == second.shape[::-1]
        fits = fits and (inner.shape, outer.shape) == (second.shape[:1], second.shape[1:])
        rotation = (second * outer).T if fits else second
    else:
        raise UserError(
            f"{path}: has {', '.join(sorted(found))}; interventions of PaddleNLP have {', '.join(_NAMES_OF_LOREFT)} or "
            f"{', '.join(_NAMES_OF_TINY)}"
        )
    if not fits or rotation.shape[0] < rotation.shape[1]:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
        raise UserError(f"{path}: {shapes} are no intervention of PaddleNLP: their shapes do not match")
    basis, mixing = np.linalg.qr(rotation)
    if _NAMES_OF_TINY[0] in found:
        return basis, basis + first * inner @ mixing.T, np.zeros(basis.shape[1])
    return basis, source @ mixing.T + basis @ (np.eye(len(mixing)) - mixing @ mixing.T), mixing @ bias


def write_reft(directory: Path, saved: SavedInterventions, layers: str, size: int) -> None:
    """Write interventions for `paddlenlp.peft.ReFTModel.from_pretrained`, into an existing directory.

    Args:
        directory: to write into; the caller commits it.
        saved: the interventions.
        layers: name of the list of the model's layers.
        size: of a hidden state.
    """
    metadata = saved.metadata
    for number in metadata.layers:
        rotation, source, bias = (
            saved.files.read(f"{layers}.{number}.{MODULE}.{kind}") for kind in (ROTATION, SOURCE, BIAS)
        )
        values = dict(zip(_NAMES_OF_LOREFT, (orthonormal(rotation), source, bias)))
        write_pickle(directory / f"intkey_layer.{number}.bin", values)
    write_json(directory / _CONFIG, _config(metadata, size))


def _config(metadata: Interventions, size: int) -> Mapping[str, Any]:
    first, last = metadata.ends
    one = {"component": "block_output", "low_rank_dimension": metadata.rank}
    return {
        "representations": [{"layer": number, **one} for number in metadata.layers],
        "intervention_params": {
            "embed_dim": size,
            "low_rank_dimension": metadata.rank,
            "dropout": 0.0,
            "dtype": "float32",
            "act_fn": "linear",
            "device": "cpu",
            "add_bias": False,
        },
        "intervention_types": [_LOREFT] * len(metadata.layers),
        "position": "+".join(f"{end}{count}" for end, count in (("f", first), ("l", last)) if count),
    }
