"""Imports a GGUF file (llama.cpp) as a model directory: weights are dequantised, the tokenizer is rebuilt.

The byte-pair tokenizers of GGUF (`tokenizer.ggml.model = gpt2`) are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.model_dir import Layout, check_config
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.convert.gguf_header import check_header
from llmsuite.errors import UserError
from llmsuite.files import write_json
from llmsuite.specs import ModelFamily

_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # gguf.TokenType.CONTROL, USER_DEFINED
_ROPE_FACTORS = "rope_freqs.weight"

# How text is split before merging, by `tokenizer.ggml.pre`: whether each digit stands alone.
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False, "default": False}


def import_gguf(source: Path, directory: Path, families: Mapping[str, ModelFamily], layout: Layout = "hf") -> None:
    """Write the model of a GGUF file into an existing directory, as float32.

    Raises:
        UserError: it is no GGUF file, no family reads its architecture, its rotary scaling is not in the file, or its
            tokenizer is not byte-pair.
    """
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError as error:
        raise UserError("reading GGUF needs the package gguf; install it with: pip install 'llmsuite[demo]'") from error
    check_header(source)
    try:
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader checks little: a damaged file fails anywhere in it
        raise UserError(f"{source}: is not a readable GGUF file: {error}") from error

    architecture = fields.get("general.architecture")
    family = next((f for f in families.values() if architecture in f.gguf_architectures), None)
    if family is None:
        known = sorted(a for f in families.values() for a in f.gguf_architectures)
        raise UserError(f"{source}: architecture {architecture!r} is not supported; supported: {', '.join(known)}")
    names = family.names()
    tensors = {}
    for tensor in reader.tensors:
        name = names.from_gguf(tensor.name)
        if name is not None:
            tensors[name] = tensor
        elif tensor.name == _ROPE_FACTORS and not np.all(dequantize(tensor.data, tensor.tensor_type) == 1):
            raise UserError(
                f"{source}: {_ROPE_FACTORS} scales the rotary frequencies by numbers whose rule is not in the file; "
                "import the model from its HF directory instead"
            )
    try:
        config = _config(source, family, fields, tied="lm_head.weight" not in tensors)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{source}: a field of its shape is none: {error}") from error
    check_config(source, family, config)
    wanted = list(names.parameter_names(config))
    missing, unexpected = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or unexpected:
        raise UserError(f"{source}: missing tensors {missing[:5]}, unexpected {unexpected[:5]}")

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        shape = [int(n) for n in reversed(tensor.shape)]
        try:
            value = dequantize(tensor.data, tensor.tensor_type).astype("float32").reshape(shape)
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"{source}: {tensor.name} cannot be read: {error}") from error
        value = names.gguf_to_hf(name, value, config)
        return value.T if names.is_linear(name) else value

    specs = []
    for name in wanted:
        shape = tuple(int(n) for n in reversed(tensors[name].shape))
        specs.append(TensorSpec(name, shape[::-1] if names.is_linear(name) else shape, "float32"))
    _write_tokenizer(source, directory, fields)
    write_model(directory, family, config, read, specs, layout)


def _config(source: Path, family: ModelFamily, fields: Mapping[str, Any], tied: bool) -> Any:
    def get(key: str, default: Any = None) -> Any:
        return _field(source, fields, f"{fields['general.architecture']}.{key}", default)

    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UserError(f"{source}: rotary scaling {scaling!r} is not supported; supported: none, linear")
    return family.config_cls(
        vocab_size=len(_field(source, fields, "tokenizer.ggml.tokens")),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv", get("attention.head_count")),
        head_dim=fields.get(f"{fields['general.architecture']}.attention.key_length"),
        max_position_embeddings=get("context_length"),
        # stored as float32; seven digits give back the number that was meant
        rms_norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rope_scaling={"rope_type": "linear", "factor": get("rope.scaling.factor")} if scaling == "linear" else None,
        tie_word_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
    )


def _field(source: Path, fields: Mapping[str, Any], name: str, default: Any = None) -> Any:
    value = fields.get(name, default)
    if value is None:
        raise UserError(f"{source}: lacks the field {name}")
    return value


def _write_tokenizer(source: Path, directory: Path, fields: Mapping[str, Any]) -> None:
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _SINGLE_DIGITS:
        raise UserError(
            f"{source}: tokenizer {kind!r} with pre-tokenizer {split!r} is not supported; supported: gpt2 with "
            f"{', '.join(_SINGLE_DIGITS)}. Put the model's own tokenizer.json beside the weights instead"
        )
    try:
        tokenizer, config = _tokenizer(source, fields, _SINGLE_DIGITS[split])
    except UserError:
        raise
    except Exception as error:  # what the library raises has no type of its own, and the fields may be of any
        raise UserError(f"{source}: its fields of a tokenizer are none: {error}") from error
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", config)


def _tokenizer(source: Path, fields: Mapping[str, Any], single_digits: bool) -> tuple[Any, dict[str, Any]]:
    """The tokenizer and the content of its tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(source, fields, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(source, fields, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if single_digits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(source, fields, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL_TOKEN]
    whole = [token for token, kind in zip(tokens, kinds) if kind == _USER_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole])

    config: dict[str, Any] = {"tokenizer_class": "PretrainedTokenizerFast"}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    config["chat_template"] = fields.get("tokenizer.chat_template")
    return tokenizer, config
