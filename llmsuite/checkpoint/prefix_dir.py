"""A directory of prefixes (prefix tuning), as HF PEFT reads it, and their base model.

    adapter_config.json            peft_type PREFIX_TUNING
    adapter_model.safetensors      `prompt_embeddings` [P, layers x 2 x J x K]: key, value, key, value …
    adapter_state.safetensors      if a network makes the prefixes: its parameters by our names, to resume from
    base.json                      path and sha256 of the base model, see `adapter_dir.py`

P prefix tokens, J key-value heads of size K, N width of the network (see `llmsuite.adapters.layers.prefix`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.prefix_shapes import INNER, INNER_BIAS, NETWORK, PREFIX_KEY, PREFIX_VALUE, TABLE
from llmsuite.base.errors import UserError
from llmsuite.base.files import write_json
from llmsuite.base.safe_files import is_file
from llmsuite.base.strict_json import check_kinds, integer
from llmsuite.checkpoint.adapter_base import Base, base_keys, read_base, write_base
from llmsuite.checkpoint.adapter_config import read_adapter_config
from llmsuite.checkpoint.adapter_dir import CONFIG_NAMES, STATE, STEMS
from llmsuite.checkpoint.expected_tensor import FLOATS, ExpectedTensor
from llmsuite.checkpoint.tensor_writer import ManifestPart, write_file
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec, sliced
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer

KIND = "PREFIX_TUNING"
"""PEFT's `peft_type` for prefixes."""
TENSOR = "prompt_embeddings"
"""Name of the one tensor in PEFT's file."""
_CONFIG = CONFIG_NAMES["hf"]
_STEM = STEMS["hf"]
_KINDS = (PREFIX_KEY, PREFIX_VALUE)
_SIZES = dict.fromkeys(("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim"), integer(1, 1 << 30))
"""Required keys of the configuration."""


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """Prefixes of a model, without their values."""

    tokens: int
    base: Base
    network: int | None = None
    """Width of the network that makes them in training; None without one."""


def write_prefixes(
    directory: Path,
    prefixes: Prefixes,
    read: Callable[[str], np.ndarray],
    specs: Sequence[TensorSpec],
    tokenizer: Path | None = None,
) -> ManifestPart:
    """Write prefixes into an existing directory. Returns their entries of the manifest.

    Args:
        directory: target; the caller commits it.
        prefixes: the prefixes, without their values.
        read: returns the values of a parameter by our name, [P, J, K] without a network. Each is read once, in the
            order of `specs`.
        specs: name, shape and dtype of every parameter, keys and values in turn, in the order of the layers.
        tokenizer: directory whose tokenizer files are copied; None for none.
    """
    state = ManifestPart()
    if prefixes.network is not None:
        values = {spec.name: read(spec.name) for spec in specs}
        state = write_file(directory / f"{STATE}{SUFFIX}", specs, values.__getitem__, {"format": "llmsuite"})
        made = compute_prefixes(values)
        specs = [TensorSpec(name, value.shape, value.dtype.name) for name, value in made.items()]
        read = made.__getitem__
    assert [spec.name.rpartition(".")[2] for spec in specs] == [*_KINDS] * (len(specs) // 2)
    tokens, heads, size = specs[0].shape
    joined = np.concatenate([read(spec.name).reshape(tokens, -1) for spec in specs], 1)
    stored = TensorSpec(TENSOR, joined.shape, specs[0].dtype)
    written = write_file(directory / f"{_STEM}{SUFFIX}", [stored], lambda name: joined, {"format": "pt"})
    written.add(state)
    write_json(
        directory / _CONFIG,
        {
            "peft_type": KIND,
            "task_type": "CAUSAL_LM",
            **base_keys(prefixes.base),
            "inference_mode": True,
            "num_virtual_tokens": tokens,
            "num_transformer_submodules": 1,
            "num_layers": len(specs) // 2,
            "num_attention_heads": heads,
            "token_dim": heads * size,
            "encoder_hidden_size": heads * size,
            "prefix_projection": False,
        },
    )
    write_base(directory, prefixes.base)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


def compute_prefixes(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the prefixes that a network makes, [P, J, K] each: keys and values in turn, in the order of the layers.

    Args:
        values: parameters of the network by our names.
    """
    table, inner, bias = (values[f"{NETWORK}.{kind}"] for kind in (TABLE, INNER, INNER_BIAS))
    # in float32, so that only the results are rounded to the stored dtype
    inside = np.tanh(table.astype("float32") @ inner.astype("float32") + bias.astype("float32"))
    suffix = f".{PREFIX_KEY}_weight"
    made = {}
    attentions = [name.removesuffix(suffix) for name in values if name.endswith(suffix)]
    for attention in sorted(attentions, key=layer_number):
        for kind in _KINDS:
            weight, bias = (values[f"{attention}.{kind}_{part}"] for part in ("weight", "bias"))
            flat = inside @ weight.reshape(len(weight), -1).astype("float32") + bias.astype("float32")
            made[f"{attention}.{kind}"] = flat.reshape(-1, *weight.shape[1:]).astype(table.dtype)
    return made


def layer_number(module: str) -> int:
    """Return the number of the layer that a module is in."""
    return next(int(word) for word in reversed(module.split(".")) if word.isdigit())


class PrefixTensors:
    """Tensors of the prefixes in a directory, by our names."""

    def __init__(self, directory: Path, data: Mapping[str, Any], files: TensorSource):
        """
        Args:
            directory: for messages.
            data: the content of its configuration.
            files: source of PEFT's `TENSOR`, which has the prefixes of all layers.

        Raises:
            UserError: the files do not fit the configuration.
        """
        self.directory = directory
        self._files = files
        check_kinds(directory / _CONFIG, data, _SIZES)
        self._tokens = data["num_virtual_tokens"]
        self._layers = data["num_layers"]
        self._heads = data["num_attention_heads"]
        self._width = data["token_dim"]
        expected = ExpectedTensor(FLOATS, (self._tokens, self._layers * 2 * self._width))
        expected.check(files.spec(TENSOR), directory, f"a prefix by {_CONFIG}")
        if self._width % self._heads:
            raise UserError(f"{directory / _CONFIG}: token_dim is {self._width}, no multiple of {self._heads} heads")

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read the keys or values of a layer, [P, J, K], or a slice. Raises UserError for a layer without any."""
        module, _, kind = name.rpartition(".")
        layer = layer_number(module)
        if layer >= self._layers:
            raise UserError(f"{self.directory}: has prefixes of {self._layers} layers; the model has more")
        first = (2 * layer + _KINDS.index(kind)) * self._width
        part = self._files.read(TENSOR, [slice(0, self._tokens), slice(first, first + self._width)])
        values = part.reshape(self._tokens, self._heads, -1)
        return sliced(values, index)

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def specs(self) -> list[TensorSpec]:
        """Specs of all keys and values, named by layer and kind, in the order of `write_prefixes`."""
        shape = self._tokens, self._heads, self._width // self._heads
        dtype = self._files.spec(TENSOR).dtype
        return [TensorSpec(f"{n}.{kind}", shape, dtype) for n in range(self._layers) for kind in _KINDS]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless they fit a model, given the shapes of its prefixes by name."""
        own = self._tokens, self._heads, self._width // self._heads
        found = next((shape for shape in shapes.values() if shape != own), own)
        if found != own or len(shapes) != 2 * self._layers:
            raise UserError(
                f"{self.directory}: has keys and values of {self._layers} layers, {own[1]} heads of size "
                f"{own[2]}; the model has {len(shapes) // 2} layers and {found[1]} heads of size {found[2]}: it is of "
                "another model"
            )


@dataclasses.dataclass(frozen=True)
class SavedPrefixes:
    """Prefixes in a directory."""

    metadata: Prefixes
    files: PrefixTensors
    network: TensorSource | None = None
    """Parameters of the network that has made them, by our names; None without one."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless they fit a model, given the shapes of its prefixes by name."""
        self.files.check(shapes)

    def trained(self, network: int | None) -> TensorSource | PrefixTensors:
        """Return the tensors to resume from, for a run with a network of this width, or with None.

        Raises:
            UserError: the saved prefixes have another network.
        """
        saved = self.metadata.network
        if saved != network:
            raise UserError(
                f"{self.files.directory}: has prefixes {_network_text(saved)}; the recipe has prefixes "
                f"{_network_text(network)}"
            )
        return self.network or self.files


def _network_text(width: int | None) -> str:
    if width:
        return f"that a network of width {width} makes"
    return "without a network"


def has_prefixes(directory: Path) -> bool:
    """Return True if a directory of adapters has prefixes."""
    config = directory / _CONFIG
    return is_file(config) and read_adapter_config(config).get("peft_type") == KIND


def open_prefixes(directory: Path) -> SavedPrefixes:
    """Open prefixes that `write_prefixes` or HF PEFT has written. Raises UserError if the directory has others."""
    data = read_adapter_config(directory / _CONFIG)
    base = read_base(directory)
    if data.get("num_transformer_submodules") not in (None, 1):
        raise UserError(f"{directory / _CONFIG}: has prefixes of an encoder and a decoder; a model here has one part")
    files = PrefixTensors(directory, data, TensorFiles(directory, _STEM))
    base = base or Base(data.get("base_model_name_or_path"), "")
    if not is_file(directory / f"{STATE}{SUFFIX}"):
        return SavedPrefixes(Prefixes(files.tokens, base), files)
    network = TensorFiles(directory, STATE)
    inner_bias = f"{NETWORK}.{INNER_BIAS}"
    for name in network.names:
        ExpectedTensor(FLOATS).check(network.spec(name), directory)
    ExpectedTensor(FLOATS, (None,)).check(network.spec(inner_bias), directory, "a bias")
    width = network.spec(inner_bias).shape[0]
    return SavedPrefixes(Prefixes(files.tokens, base, width), files, network)
