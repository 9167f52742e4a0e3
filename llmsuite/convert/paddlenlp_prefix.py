"""Prefixes as PaddleNLP saves them (`paddlenlp.peft.PrefixModelForCausalLM`), read and written.

    prefix_config.json            tokens, layers, heads, and whether a network is in front (`prefix_projection`)
    prefix_model_state.pdparams   a pickle: `0.weight` [P, 2 x layers x J x K], keys of all layers, then values; or the
                                  embedding and the two matrices of the network that makes them
    pre_caches.npy                the same as [layers, 2, J, P, K], for its inference; written and not read

P prefix tokens, J key-value heads of size K. Keys are rotated neither there nor here. There the text begins at position
0, here behind the prefix, at P: a key that is turned by P positions has the same products with all queries, so keys are
turned by P when they are read, and back when they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_dir import Base
from llmsuite.checkpoint.beside import PREFIX_OF_PADDLENLP
from llmsuite.checkpoint.prefix_dir import TENSOR, Prefixes, PrefixTensors, SavedPrefixes
from llmsuite.checkpoint.tensors import HeldTensors
from llmsuite.convert.paddle_save import write_pickle
from llmsuite.convert.pdparams import PickledTensors
from llmsuite.errors import UserError
from llmsuite.files import read_json_file, write_json

PICKLE = "prefix_model_state.pdparams"
_CACHES = "pre_caches.npy"
_FAMILIES = ("llama", "mistral", "qwen2")
"""`model_type` of those that PaddleNLP has prefix tuning for and we have, see `get_prefix_tuning_params` there."""
_TABLE, _NETWORK = "0.weight", ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias")


def open_prefix(directory: Path, config: Any, base: Base) -> SavedPrefixes:
    """A prefix that PaddleNLP has saved.

    Args:
        directory: where it is.
        config: shape of the model that it is for, whose rotations are needed.
        base: that model.

    Raises:
        UserError: it is of another model, or has no counterpart here.
    """
    path = directory / PREFIX_OF_PADDLENLP
    _check_family(directory, config)
    data = read_json_file(path)
    try:
        tokens, layers = int(data["num_prefix_tokens"]), int(data["num_hidden_layers"])
        heads = int(data.get("multi_query_group_num") or data["num_attention_heads"])
        size = int(data["hidden_size"]) // int(data["num_attention_heads"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: does not say how many tokens, layers and heads: {error!r}") from error
    if not (directory / PICKLE).is_file():
        of_ranks = ", ".join(sorted(part.name for part in directory.glob("prefix_model_state.*.pdparams")))
        raise UserError(
            f"{directory}: has no {PICKLE}"
            + f"; {of_ranks} are parts of ranks, each with other heads. Let PaddleNLP merge them" * bool(of_ranks)
        )
    table = _table(directory / PICKLE, bool(data.get("prefix_projection")))
    if table.shape != (tokens, 2 * layers * heads * size):
        raise UserError(
            f"{directory / PICKLE}: makes keys and values {list(table.shape)}; by {path.name} it would be "
            f"{[tokens, 2 * layers * heads * size]}"
        )
    parts = table.reshape(tokens, 2, layers, heads, size).transpose(0, 2, 1, 3, 4)
    keys = turned(parts[:, :, 0], config, tokens)
    whole: np.ndarray = np.stack([keys, parts[:, :, 1]], 2).reshape(tokens, -1)
    shape = {
        "num_virtual_tokens": tokens,
        "num_layers": layers,
        "num_attention_heads": heads,
        "token_dim": heads * size,
    }
    held = HeldTensors({TENSOR: whole.astype("float32")}, [directory / PICKLE])
    return SavedPrefixes(Prefixes(tokens, base), PrefixTensors(directory, shape, held))


def _table(path: Path, is_projected: bool) -> np.ndarray:
    """Keys and values [P, 2 x layers x J x K], in float64."""
    files = PickledTensors([path])
    wanted = _NETWORK if is_projected else (_TABLE,)
    if set(files.names) != set(wanted):
        raise UserError(f"{path}: has {', '.join(sorted(files.names))}, not {', '.join(wanted)}")
    first, *network = (files.read(name).astype("float64") for name in wanted)
    if not network:
        return first
    inner, inner_bias, outer, outer_bias = network
    return np.tanh(first @ inner + inner_bias) @ outer + outer_bias


def turned(keys: np.ndarray, config: Any, positions: int) -> np.ndarray:
    """Keys [..., K] as the rotation of a model turns them by some positions, in float64; back for negative ones."""
    angles = positions * np.asarray(config.rope_frequencies())
    first, second = np.split(keys.astype("float64"), 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def write_prefix(directory: Path, saved: SavedPrefixes, config: Any) -> None:
    """Write what `paddlenlp.peft.PrefixModelForCausalLM.from_pretrained` reads, into an existing directory.

    Args:
        directory: where to; the caller commits it.
        saved: the prefixes.
        config: shape of the model that they are for.

    Raises:
        UserError: PaddleNLP has no prefix of such a model.
    """
    _check_family(directory, config)
    tokens, specs = saved.told.tokens, saved.files.specs
    heads = specs[0].shape[1]
    values = [saved.files.read(spec.name).astype("float64") for spec in specs]
    keys = np.stack([turned(value, config, -tokens) for value in values[::2]], 1)
    whole = np.stack([keys, np.stack(values[1::2], 1)], 1).astype("float32")  # [P, 2, layers, J, K]
    write_pickle(directory / PICKLE, {_TABLE: whole.reshape(tokens, -1)})
    np.save(directory / _CACHES, whole.transpose(2, 1, 3, 0, 4))
    write_json(directory / PREFIX_OF_PADDLENLP, _settings(tokens, heads, len(specs) // 2, config))


def _settings(tokens: int, heads: int, layers: int, config: Any) -> Mapping[str, Any]:
    """The content of prefix_config.json."""
    return {
        "prefix_dropout": 0.0,
        "num_prefix_tokens": tokens,
        "num_attention_heads": config.num_attention_heads,
        "multi_query_group_num": None if heads == config.num_attention_heads else heads,
        "num_hidden_layers": layers,
        "hidden_size": config.hidden_size,
        "prefix_projection": False,
        "prefix_projection_hidden_size": None,
        "tensor_parallel_degree": -1,
        "dtype": "float32",
    }


def _check_family(directory: Path, config: Any) -> None:
    kind = config.to_hf()["model_type"]
    if kind not in _FAMILIES:
        raise UserError(
            f"{directory}: PaddleNLP has prefix tuning for {', '.join(_FAMILIES)}, and the model is a {kind}"
        )
    if config.head_size * config.num_attention_heads != config.hidden_size:
        raise UserError(
            f"{directory}: heads of the model have size {config.head_size}; those of PaddleNLP's prefixes are of "
            f"hidden_size / num_attention_heads = {config.hidden_size // config.num_attention_heads}, whatever the "
            "model says"
        )
