"""Imports a GGUF file (llama.cpp) as a model directory: weights are dequantised, the tokenizer is rebuilt.

The byte-pair tokenizers of GGUF (`tokenizer.ggml.model = gpt2`) are supported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.strict_json import parse_json
from llmsuite.checkpoint.convert.gguf_header import check_header
from llmsuite.checkpoint.convert.gguf_tokenizer import field, read_tokenizer, save_tokenizer
from llmsuite.checkpoint.finite import raise_on_nonfinite
from llmsuite.checkpoint.model_dir import Layout, check_config
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensor_writer import WriteOptions
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.gguf_names import ROPE_FACTORS

ROPE_SCALING = "llmsuite.rope_scaling"
"""A field in which llmsuite stores rope_scaling of config.json: for some kinds GGUF itself has only the factors."""

_BIASES = {"attention_bias": "self_attn.o_proj", "mlp_bias": "mlp.down_proj"}


def import_gguf(
    source: Path,
    directory: Path,
    families: Mapping[str, ModelFamily],
    layout: Layout = "hf",
    allow_nonfinite: bool = False,
) -> None:
    """Write the model of a GGUF file into an existing directory, as float32.

    Raises:
        UserError: it is no GGUF file, no family reads its architecture, its rotary scaling is not in the file, its
            tokenizer is not byte-pair, or a value is not finite, unless that is allowed.
    """
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError as error:
        raise UserError(f"reading GGUF needs the package gguf; install it with: {install_command('gguf')}") from error
    check_header(source)
    try:
        reader = gguf.GGUFReader(source)
        fields = {name: found.contents() for name, found in reader.fields.items()}
    except Exception as error:  # the reader checks little: a damaged file may raise anything
        raise UserError(f"{source}: is not a readable GGUF file: {error}") from error

    architecture = fields.get("general.architecture")
    family = next((f for f in families.values() if architecture in f.gguf_architectures), None)
    if family is None:
        known = sorted(a for f in families.values() for a in f.gguf_architectures)
        raise UserError(f"{source}: architecture {architecture!r} is not supported; supported: {', '.join(known)}")
    names = family.names()
    tensors = {}
    factors = None
    for tensor in reader.tensors:
        name = names.from_gguf(tensor.name)
        if name is not None:
            tensors[name] = tensor
        elif tensor.name == ROPE_FACTORS:
            factors = dequantize(tensor.data, tensor.tensor_type)
    try:
        config = _config(source, family, fields, tensors)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{source}: a field of its shape is none: {error}") from error
    check_config(source, family, config)
    if factors is not None:
        _check_factors(source, factors, config)
    expected = list(names.parameter_names(config))
    missing = sorted(set(expected) - set(tensors))
    unexpected = sorted(set(tensors) - set(expected))
    if missing or unexpected:
        raise UserError(f"{source}: missing tensors {missing[:5]}, unexpected {unexpected[:5]}")

    specs = _specs(source, tensors, names.parameter_shapes(config), names.is_linear)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        shape = [int(n) for n in reversed(tensor.shape)]
        try:
            value = dequantize(tensor.data, tensor.tensor_type).astype("float32").reshape(shape)
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"{source}: {tensor.name} cannot be read: {error}") from error
        value = names.gguf_to_hf(name, value, config)
        return value.T if names.is_linear(name) else value

    save_tokenizer(*read_tokenizer(source, fields), directory)
    options = WriteOptions(on_nonfinite=None if allow_nonfinite else raise_on_nonfinite(source))
    write_model(directory, family, config, read, specs, layout, options=options)


def _specs(
    source: Path, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], is_linear: Callable[[str], bool]
) -> list[TensorSpec]:
    """The specs of the tensors in memory. Raises UserError for a shape that contradicts the fields of the file.

    Args:
        source: the file, for messages.
        tensors: by our names.
        shapes: as in memory, by our names, in the order of the model.
        is_linear: returns True for a tensor that is transposed in memory.
    """
    specs = []
    wrong = []
    for name, expected in shapes.items():
        dims = tuple(
            int(size) for size in tensors[name].shape
        )  # GGUF lists dims in reverse, which is the order of a transposed matrix
        found = dims if is_linear(name) else dims[::-1]
        if found != tuple(expected):
            wrong.append(f"{tensors[name].name} is {list(dims[::-1])}, which makes {name} {list(found)}")
            wrong[-1] += f"; by the fields of the file it is {list(expected)}"
        specs.append(TensorSpec(name, found, "float32"))
    if wrong:
        raise UserError(f"{source}: {len(wrong)} tensors have another shape: {'; '.join(wrong[:5])}")
    return specs


def _own_scaling(source: Path, written: Any) -> Any:
    """The rope_scaling of the config.json from which llmsuite has written a GGUF file."""
    try:
        return parse_json(written if isinstance(written, str) else "")
    except ValueError as error:
        raise UserError(f"{source}: {ROPE_SCALING} is not JSON: {error}") from error


def _config(source: Path, family: ModelFamily, fields: Mapping[str, Any], tensors: Collection[str]) -> Any:
    def get(key: str, default: Any = None) -> Any:
        return field(source, fields, f"{fields['general.architecture']}.{key}", default)

    kind = get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UserError(f"{source}: rotary scaling {kind!r} is not supported; supported: none, linear")
    scaling = None
    if kind == "linear":
        scaling = {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    if ROPE_SCALING in fields:
        scaling = _own_scaling(source, fields[ROPE_SCALING])
    known = {f.name for f in dataclasses.fields(family.config_cls)}
    biases = {key: f"model.layers.0.{part}.bias" in tensors for key, part in _BIASES.items() if key in known}
    return family.config_cls(
        model_type=fields["general.architecture"],
        **biases,
        vocab_size=len(field(source, fields, "tokenizer.ggml.tokens")),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv", get("attention.head_count")),
        head_dim=fields.get(f"{fields['general.architecture']}.attention.key_length"),
        max_position_embeddings=get("context_length"),
        # stored as float32; seven digits restore the decimal number
        rms_norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        tie_word_embeddings="lm_head.weight" not in tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=_ends(fields),
    )


def _ends(fields: Mapping[str, Any]) -> int | list[int] | None:
    """The end of sequence, with those of a turn and of a message where there are any."""
    given = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(int(token) for token in given if token is not None))
    if len(ends) > 1:
        return ends
    return ends[0] if ends else None


def rope_factors(config: Any) -> np.ndarray:
    """The divisors [pairs] of the rotary frequencies by rope_scaling: frequencies without it / frequencies with it."""
    plain = np.asarray(dataclasses.replace(config, rope_scaling=None).rope_frequencies())
    return (plain / np.asarray(config.rope_frequencies())).astype("float32")


def _check_factors(source: Path, factors: np.ndarray, config: Any) -> None:
    expected = rope_factors(config)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-5):
        raise UserError(
            f"{source}: {ROPE_FACTORS} scales the rotary frequencies by factors whose rope_scaling is not in the file; "
            "import the model from its HF directory instead"
        )
