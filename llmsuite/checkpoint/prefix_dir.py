"""A directory of prefixes (prefix tuning), as HF PEFT reads it, and the model that they belong to.

    adapter_config.json            peft_type PREFIX_TUNING
    adapter_model.safetensors      `prompt_embeddings` [P, layers x 2 x J x K]: key, value, key, value …
    adapter_state.safetensors      of those that a network makes: its parameters by our names, to go on from
    base.json                      path and sha256 of the model they were trained on, see `adapter_dir.py`

P prefix tokens, J key-value heads of size K, N width of the network (see `llmsuite.models.prefix`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_base import Base, base_keys, read_base, write_base
from llmsuite.checkpoint.adapter_config import read_adapter_config
from llmsuite.checkpoint.adapter_dir import CONFIG_NAMES, STATE, STEMS
from llmsuite.checkpoint.parts import FLOATS, Part
from llmsuite.checkpoint.tensor_writer import ManifestPart, write_file
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.errors import UserError
from llmsuite.files import write_json
from llmsuite.models.prefix_shapes import INNER, INNER_BIAS, NETWORK, PREFIX_KEY, PREFIX_VALUE, TABLE
from llmsuite.regular import is_file
from llmsuite.strict_json import check_kinds, whole

KIND = "PREFIX_TUNING"
"""What PEFT's `peft_type` says of them."""
TENSOR = "prompt_embeddings"
"""Name of the one tensor in PEFT's file."""
_CONFIG, _STEM = CONFIG_NAMES["hf"], STEMS["hf"]
_KINDS = (PREFIX_KEY, PREFIX_VALUE)
_SIZES = dict.fromkeys(("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim"), whole(1, 1 << 30))
"""Keys of the configuration that cannot be left out."""


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """The prefixes of a model, without their values."""

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
        directory: where to; the caller commits it.
        prefixes: which ones.
        read: values of a parameter by our name, [P, J, K] without a network. Each is read once, in the order of
            `specs`.
        specs: name, shape and dtype of every parameter, keys and values in turn, in the order of the layers.
        tokenizer: directory whose tokenizer files are copied along.
    """
    state = ManifestPart()
    if prefixes.network is not None:
        values = {spec.name: read(spec.name) for spec in specs}
        state = write_file(directory / f"{STATE}{SUFFIX}", specs, values.__getitem__, {"format": "llmsuite"})
        made = made_prefixes(values)
        specs, read = (
            [TensorSpec(name, value.shape, value.dtype.name) for name, value in made.items()],
            made.__getitem__,
        )
    assert [spec.name.rpartition(".")[2] for spec in specs] == [*_KINDS] * (len(specs) // 2)
    tokens, heads, size = specs[0].shape
    whole = np.concatenate([read(spec.name).reshape(tokens, -1) for spec in specs], 1)
    stored = TensorSpec(TENSOR, whole.shape, specs[0].dtype)
    written = write_file(directory / f"{_STEM}{SUFFIX}", [stored], lambda name: whole, {"format": "pt"})
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


def made_prefixes(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The prefixes that a network makes, [P, J, K] each: keys and values in turn, in the order of the layers.

    Args:
        values: its parameters by our names.
    """
    table, inner, bias = (values[f"{NETWORK}.{kind}"] for kind in (TABLE, INNER, INNER_BIAS))
    inside = np.tanh(table.astype("float32") @ inner.astype("float32") + bias.astype("float32"))
    suffix, made = f".{PREFIX_KEY}_weight", {}
    attentions = [name.removesuffix(suffix) for name in values if name.endswith(suffix)]
    for attention in sorted(attentions, key=number_of_layer):
        for kind in _KINDS:
            weight, bias = (values[f"{attention}.{kind}_{part}"] for part in ("weight", "bias"))
            flat = inside @ weight.reshape(len(weight), -1).astype("float32") + bias.astype("float32")
            made[f"{attention}.{kind}"] = flat.reshape(-1, *weight.shape[1:]).astype(table.dtype)
    return made


def number_of_layer(module: str) -> int:
    """Number of the layer that a module is in."""
    return next(int(word) for word in reversed(module.split(".")) if word.isdigit())


class PrefixTensors:
    """The prefixes in a directory, by our names."""

    def __init__(self, directory: Path, data: Mapping[str, Any], files: TensorSource):
        """
        Args:
            directory: for messages.
            data: the content of its configuration.
            files: has the prefixes of all layers as PEFT's `TENSOR`.

        Raises:
            UserError: the files are not what the configuration says.
        """
        self.directory, self._files = directory, files
        check_kinds(directory / _CONFIG, data, _SIZES)
        self._tokens, self._layers = data["num_virtual_tokens"], data["num_layers"]
        self._heads, self._width = data["num_attention_heads"], data["token_dim"]
        wanted = (self._tokens, self._layers * 2 * self._width)
        Part(FLOATS, wanted).check(files.spec(TENSOR), directory, f"a prefix by {_CONFIG}")
        if self._width % self._heads:
            raise UserError(f"{directory / _CONFIG}: token_dim is {self._width}, no multiple of {self._heads} heads")

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """The keys or values of a layer, [P, J, K], or a slice of them. Raises UserError for a layer without any."""
        module, _, kind = name.rpartition(".")
        layer = number_of_layer(module)
        if layer >= self._layers:
            raise UserError(f"{self.directory}: has prefixes of {self._layers} layers; the model has more")
        first = (2 * layer + _KINDS.index(kind)) * self._width
        part = self._files.read(TENSOR, [slice(0, self._tokens), slice(first, first + self._width)])
        values = part.reshape(self._tokens, self._heads, -1)
        return values if index is None else values[tuple(index)]

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def specs(self) -> list[TensorSpec]:
        """Number of its layer and kind as a name, shape and dtype of every part, in the order of `write_prefixes`."""
        shape = self._tokens, self._heads, self._width // self._heads
        dtype = self._files.spec(TENSOR).dtype
        return [TensorSpec(f"{n}.{kind}", shape, dtype) for n in range(self._layers) for kind in _KINDS]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError unless they are those of a model, by the shapes of its prefixes by name."""
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

    told: Prefixes
    files: PrefixTensors
    network: TensorSource | None = None
    """The parameters of the network that has made them, by our names; None without one."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """As `PrefixTensors.check`."""
        self.files.check(shapes)

    def trained(self, network: int | None) -> TensorSource | PrefixTensors:
        """What a run with a network of this width goes on from, or one without. Raises UserError when there is another
        one."""
        if self.told.network != network:
            kinds = [
                f"that a network of width {n} makes" if n else "without a network" for n in (self.told.network, network)
            ]
            raise UserError(f"{self.files.directory}: has prefixes {kinds[0]}; the recipe has prefixes {kinds[1]}")
        return self.network or self.files


def has_prefixes(directory: Path) -> bool:
    """Whether a directory of adapters is one of prefixes."""
    config = directory / _CONFIG
    return is_file(config) and read_adapter_config(config).get("peft_type") == KIND


def open_prefixes(directory: Path) -> SavedPrefixes:
    """Open what `write_prefixes` or HF PEFT has written. Raises UserError when it is not that."""
    data, base = read_adapter_config(directory / _CONFIG), read_base(directory)
    if data.get("num_transformer_submodules") not in (None, 1):
        raise UserError(f"{directory / _CONFIG}: has prefixes of an encoder and a decoder; a model here has one part")
    files = PrefixTensors(directory, data, TensorFiles(directory, _STEM))
    base = base or Base(data.get("base_model_name_or_path"), "")
    if not is_file(directory / f"{STATE}{SUFFIX}"):
        return SavedPrefixes(Prefixes(files.tokens, base), files)
    network = TensorFiles(directory, STATE)
    inner_bias = f"{NETWORK}.{INNER_BIAS}"
    for name in network.names:
        Part(FLOATS).check(network.spec(name), directory)
    Part(FLOATS, (None,)).check(network.spec(inner_bias), directory, "a bias")
    width = network.spec(inner_bias).shape[0]
    return SavedPrefixes(Prefixes(files.tokens, base, width), files, network)
