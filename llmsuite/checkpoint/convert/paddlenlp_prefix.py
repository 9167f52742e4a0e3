"""Reads and writes prefixes in PaddleNLP's layout (`paddlenlp.peft.PrefixModelForCausalLM`).

    prefix_config.json            tokens, layers, heads, and `prefix_projection`: is there a network in front
    prefix_model_state.pdparams   a pickle: `0.weight` [P, 2 x layers x J x K], keys of all layers, then values; or the
                                  embedding [P, J x K] and two layers of the network that makes them, the last one of
                                  which has these outputs
    pre_caches.npy                the same as [layers, 2, J, P, K], for its inference; written and not read

P prefix tokens, J key-value heads of size K. Keys are stored without rotary embedding in both layouts. In PaddleNLP the
text begins at position 0, here after the prefix, at P. A key that is rotated by P positions has the same products with
all queries, so keys are rotated by P when they are read, and back when they are written; where a network makes the
keys, its last layer is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.prefix_shapes import ATTENTION, INNER, INNER_BIAS, NETWORK, PREFIX_KEY, PREFIX_VALUE, TABLE
from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object, write_json
from llmsuite.base.safe_files import is_file, listed
from llmsuite.base.strict_json import FLAG, NULL, check_kinds, integer
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.convert.paddle_save import write_pickle
from llmsuite.checkpoint.convert.pdparams import PickledTensors
from llmsuite.checkpoint.prefix_dir import TENSOR, Prefixes, PrefixTensors, SavedPrefixes, layer_number
from llmsuite.checkpoint.side_adapters import PREFIX_OF_PADDLENLP
from llmsuite.checkpoint.tensors import InMemoryTensors, TensorSource

PICKLE = "prefix_model_state.pdparams"
_CACHES = "pre_caches.npy"
_SIZE = integer(1, 1 << 30)
_KINDS = {
    **dict.fromkeys(("num_prefix_tokens", "num_hidden_layers", "num_attention_heads", "hidden_size"), _SIZE),
    "multi_query_group_num": _SIZE | NULL,
    "prefix_projection": FLAG | NULL,
}
"""Keys of its configuration that are read."""
_FAMILIES = ("llama", "mistral", "qwen2")
"""`model_type` of the models with prefix tuning in PaddleNLP (its `get_prefix_tuning_params`) and here."""
_TABLE = "0.weight"
_NETWORK = ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias")


def open_prefix(directory: Path, list_of_layers: str, config: Any, base: Base) -> SavedPrefixes:
    """Open a prefix that PaddleNLP has saved.

    Args:
        directory: of the prefix.
        list_of_layers: name of the list of layers of its base model.
        config: shape of the base model, with its rotary embedding.
        base: that model.

    Raises:
        UserError: it belongs to another model, or has no counterpart here.
    """
    path = directory / PREFIX_OF_PADDLENLP
    _check_family(directory, config)
    data = read_json_object(path)
    check_kinds(path, data, _KINDS)
    tokens = data["num_prefix_tokens"]
    layers = data["num_hidden_layers"]
    heads = data.get("multi_query_group_num") or data["num_attention_heads"]
    size = data["hidden_size"] // data["num_attention_heads"]
    if not is_file(directory / PICKLE):
        parts = ", ".join(part.name for part in listed(directory, "prefix_model_state.*.pdparams"))
        hint = ""
        if parts:
            hint = f"; {parts} are parts of ranks, each with other heads. Let PaddleNLP merge them"
        raise UserError(f"{directory}: has no {PICKLE}{hint}")
    values = _values(directory / PICKLE, bool(data.get("prefix_projection")))
    table = _table(values)
    if table.shape != (tokens, 2 * layers * heads * size):
        raise UserError(
            f"{directory / PICKLE}: gives keys and values {list(table.shape)}; by {path.name} they are "
            f"{[tokens, 2 * layers * heads * size]}"
        )
    by_layer = _from_paddlenlp(table.reshape(tokens, 2, layers, heads, size), config, tokens)
    flat: np.ndarray = by_layer.reshape(tokens, -1)
    shape = {
        "num_virtual_tokens": tokens,
        "num_layers": layers,
        "num_attention_heads": heads,
        "token_dim": heads * size,
    }
    held = InMemoryTensors({TENSOR: flat.astype("float32")}, [directory / PICKLE])
    tensors = PrefixTensors(directory, shape, held)
    if len(values) == 1:
        return SavedPrefixes(Prefixes(tokens, base), tensors)
    embedding, inner, inner_bias, outer, outer_bias = values
    found = {TABLE: embedding, INNER: inner, INNER_BIAS: inner_bias}
    ours = {f"{NETWORK}.{kind}": value for kind, value in found.items()}
    weights = _from_paddlenlp(outer.reshape(len(outer), 2, layers, heads, size), config, tokens)
    biases = _from_paddlenlp(outer_bias.reshape(1, 2, layers, heads, size), config, tokens)[0]
    for layer in range(layers):
        for number, kind in enumerate((PREFIX_KEY, PREFIX_VALUE)):
            name = f"{list_of_layers}.{layer}.{ATTENTION}.{kind}"
            ours[f"{name}_weight"] = weights[:, layer, number]
            ours[f"{name}_bias"] = biases[layer, number].reshape(-1)
    network = InMemoryTensors({name: value.astype("float32") for name, value in ours.items()}, [directory / PICKLE])
    return SavedPrefixes(Prefixes(tokens, base, len(inner_bias)), tensors, network)


def _from_paddlenlp(parts: np.ndarray, config: Any, tokens: int) -> np.ndarray:
    """Convert [..., 2, layers, J, K] for a text that begins at position 0 to [..., layers, 2, J, K] for one that begins
    after the prefix: of keys and values, or of the layer that makes them."""
    keys = rotate_keys(parts[:, 0], config, tokens)
    values = parts[:, 1]
    return np.stack([keys, values], 2)


def _values(path: Path, is_projected: bool) -> list[np.ndarray]:
    """The tensors of a pickle, in float64, so that rotating them loses nothing."""
    files = PickledTensors([path])
    expected = _NETWORK if is_projected else (_TABLE,)
    if set(files.names) != set(expected):
        raise UserError(f"{path}: has {', '.join(sorted(files.names))}, not {', '.join(expected)}")
    return [files.read(name).astype("float64") for name in expected]


def _table(values: Sequence[np.ndarray]) -> np.ndarray:
    """Keys and values [P, 2 x layers x J x K]."""
    first, *network = values
    if not network:
        return first
    inner, inner_bias, outer, outer_bias = network
    return np.tanh(first @ inner + inner_bias) @ outer + outer_bias


def rotate_keys(keys: np.ndarray, config: Any, positions: int) -> np.ndarray:
    """Rotate keys [..., K] by the rotary embedding of a model, in float64; back for a negative number of positions."""
    angles = positions * np.asarray(config.rope_frequencies())
    first, second = np.split(keys.astype("float64"), 2, -1)
    cos = np.cos(angles)
    sin = np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def write_prefix(directory: Path, saved: SavedPrefixes, config: Any) -> None:
    """Write prefixes for `paddlenlp.peft.PrefixModelForCausalLM.from_pretrained`, into an existing directory.

    Args:
        directory: to write into; the caller commits it.
        saved: the prefixes.
        config: shape of their base model.

    Raises:
        UserError: PaddleNLP has no prefix tuning for such a model.
    """
    _check_family(directory, config)
    tokens = saved.metadata.tokens
    specs = saved.files.specs
    heads = specs[0].shape[1]
    values = [saved.files.read(spec.name).astype("float64") for spec in specs]
    table = _to_paddlenlp(values[::2], values[1::2], config, tokens)
    pickled = {_TABLE: table.reshape(tokens, -1)}
    if saved.network is not None:
        pickled = _network(saved.network, config, tokens)
    write_pickle(directory / PICKLE, pickled)
    np.save(directory / _CACHES, table.transpose(2, 1, 3, 0, 4))
    settings = _settings(tokens, heads, len(specs) // 2, config, saved.metadata.network)
    write_json(directory / PREFIX_OF_PADDLENLP, settings)


def _to_paddlenlp(keys: Sequence[np.ndarray], values: Sequence[np.ndarray], config: Any, tokens: int) -> np.ndarray:
    """Reverse `_from_paddlenlp`, from the parts of each layer: [..., 2, layers, J, K] in float32."""
    rotated_back = np.stack([rotate_keys(value, config, -tokens) for value in keys], 1)
    return np.stack([rotated_back, np.stack(values, 1)], 1).astype("float32")


def _network(files: TensorSource, config: Any, tokens: int) -> dict[str, np.ndarray]:
    """The parameters of a network under PaddleNLP's names."""
    first = [files.read(f"{NETWORK}.{kind}").astype("float32") for kind in (TABLE, INNER, INNER_BIAS)]
    weights = []
    biases = []
    for kind in (PREFIX_KEY, PREFIX_VALUE):
        names = sorted((name for name in files.names if name.endswith(f".{kind}_weight")), key=layer_number)
        weights.append([files.read(name).astype("float64") for name in names])
        read = (files.read(name.replace(f".{kind}_weight", f".{kind}_bias")).astype("float64") for name in names)
        biases.append([bias.reshape(1, *weights[-1][0].shape[1:]) for bias in read])
    outer, outer_bias = (_to_paddlenlp(of_keys, of_values, config, tokens) for of_keys, of_values in (weights, biases))
    return dict(zip(_NETWORK, (*first, outer.reshape(len(outer), -1), outer_bias.reshape(-1))))


def _settings(tokens: int, heads: int, layers: int, config: Any, network: int | None) -> Mapping[str, Any]:
    """The content of prefix_config.json."""
    return {
        "prefix_dropout": 0.0,
        "num_prefix_tokens": tokens,
        "num_attention_heads": config.num_attention_heads,
        "multi_query_group_num": None if heads == config.num_attention_heads else heads,
        "num_hidden_layers": layers,
        "hidden_size": config.hidden_size,
        "prefix_projection": network is not None,
        "prefix_projection_hidden_size": network,
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
            f"{directory}: heads of the model have size {config.head_size}; those of PaddleNLP's prefixes always have "
            f"hidden_size / num_attention_heads = {config.hidden_size // config.num_attention_heads}"
        )
