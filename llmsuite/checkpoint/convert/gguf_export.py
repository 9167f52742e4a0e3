"""Writes a model as a GGUF file for llama.cpp, Ollama and LM Studio.

The library gguf implements the format; names, fields and the order of rotary halves follow llama.cpp's
`convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.checkpoint.convert.gguf import ROPE_SCALING, rope_factors
from llmsuite.checkpoint.convert.gguf_tokenizer import CONTROL, Vocabulary, read_vocabulary
from llmsuite.checkpoint.convert.gguf_types import (
    BLOCK,
    DTYPES,
    FILE_TYPES,
    K_BLOCK,
    k_quants,
    max_magnitude,
    quantised,
    tensor_type,
)
from llmsuite.checkpoint.finite import count_nonfinite
from llmsuite.checkpoint.finite_model import nonfinite_handler
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.models.gguf_names import ROPE_FACTORS
from llmsuite.models.head import head_of
from llmsuite.models.protocols import HasGgufNames, window_of


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """The fields of a GGUF file about conversations, in addition to the vocabulary."""

    bos_id: int | None
    eos_id: int
    pad_id: int | None
    eot_id: int | None = None
    """A second token that ends an answer."""
    eom_id: int | None = None
    """A third token that ends an answer; GGUF has no more."""
    adds_bos: bool = False
    """True where the begin-of-sequence token is put in front of a text."""
    control: frozenset[int] = frozenset()
    """Control tokens, independent of their flags in tokenizer.json."""
    chat_template: str | None = None


@dataclasses.dataclass(frozen=True)
class _Tensor:
    ours: str
    theirs: str
    shape: tuple[int, ...]
    """[outputs, inputs], as HF has it."""
    kind: Any
    """A gguf.GGMLQuantizationType."""
    num_bytes: int


class GgufExport:
    """A model for writing as GGUF; checked before anything is written."""

    def __init__(self, model: ModelDirectory, dtype: str = "fp16"):
        """
        Args:
            model: of a family that has GGUF names.
            dtype: of `DTYPES`, for matrices whose rows are a multiple of the block; other matrices get fp16, all else
                fp32. The embedding and the output projection get 8 bits where the others have 4 or 5, and llama.cpp's
                types in q4_k_m.

        Raises:
            UserError: the model cannot be written as GGUF, or the package gguf or libgguf is missing.
        """
        self._gguf = _library()
        if dtype == "q4_k_m":
            k_quants()
        self.model = model
        self.config = model.config
        names = model.family.names()
        self._dtype = DTYPES[dtype]
        self.architecture = self._architecture()
        self._check_shape()
        self.vocabulary: Vocabulary = read_vocabulary(model.tokenizer_directory, self.config.vocab_size)
        self.tensors: list[_Tensor] = []
        for name in names.parameter_names(self.config):
            theirs = names.to_gguf(name)
            assert theirs is not None, f"{name} has no name in GGUF"
            shape = model.spec(name).shape[::-1] if names.is_linear(name) else model.spec(name).shape
            self.tensors.append(self._tensor(name, theirs, shape))

    def _architecture(self) -> str:
        family = self.model.family
        names = self.model.family.names()
        if not family.gguf_architectures or not isinstance(names, HasGgufNames):
            raise UserError(
                f"{self.model.path}: is a {family.name}; GGUF can be written only for families with known GGUF names, "
                "such as llama and qwen. Choose --layout hf, and convert that with llama.cpp's convert_hf_to_gguf.py"
            )
        model_type = self.config.to_hf()["model_type"]
        if model_type in family.gguf_architectures:
            return str(model_type)
        return str(family.gguf_architectures[0])

    def _check_shape(self) -> None:
        if head_of(self.config) != "language_model":
            raise UserError(f"{self.model.path}: has a score head; GGUF is for language models only")
        if self.model.side_adapter is not None:
            raise UserError(f"{self.model.path}: has interventions or prefixes, which GGUF does not support")
        window = window_of(self.config)
        if window is not None:
            raise UserError(
                f"{self.model.path}: attention has a window (sliding_window {window}), which GGUF does not support for "
                "this family. For texts that are not longer, set sliding_window to null in its config.json"
            )
        scaling = self.config.rope_scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise UserError(
                f"{self.model.path}: rope_scaling is of type {kind!r}; GGUF is written with default, linear, llama3. "
                "For texts that need no longer context, set rope_scaling to null in its config.json"
            )

    def _tensor(self, ours: str, theirs: str, shape: tuple[int, ...]) -> _Tensor:
        kinds = self._gguf.GGMLQuantizationType
        config = self.config
        is_tied = bool(config.tie_word_embeddings)
        name = "F32" if len(shape) < 2 else tensor_type(self._dtype, theirs, shape[-1], config, is_tied)
        kind = kinds[name]
        block, num_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        return _Tensor(ours, theirs, shape, kind, int(np.prod(shape)) // block * num_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def kinds(self) -> str:
        """Types of the stored matrices, joined by "/"."""
        return "/".join(sorted({tensor.kind.name for tensor in self.tensors if len(tensor.shape) > 1}))

    @property
    def remarks(self) -> list[str]:
        """Notes about matrices that are stored in another type than requested."""
        rows = [tensor.shape[-1] for tensor in self.tensors if len(tensor.shape) > 1]
        block = {"Q4_K_M": K_BLOCK, "Q8_0": BLOCK, "Q5_1": BLOCK, "Q4_1": BLOCK}.get(self._dtype, 1)
        odd = [row for row in rows if row % block]
        if not odd:
            return []
        others = "F16"
        if block == K_BLOCK:
            others = "Q5_0, Q8_0 or F16, as llama.cpp does"
        return [
            f"{len(odd)} of {len(rows)} matrices have rows of {', '.join(map(str, sorted(set(odd))))}, which is no "
            f"multiple of {block}: these are {others}"
        ]

    def write(self, path: Path, dialogue: Dialogue, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write the file; one tensor at a time is in memory.

        Raises:
            UserError: a value is not finite, or too large for fp16 or for scales in it.
        """
        with self._writer() as writer:
            self._add_fields(writer)
            self._add_tokenizer(writer, dialogue)
            factors = rope_factors(self.config)
            if scales := not np.all(factors == 1) and not self._is_linear:
                writer.add_string(ROPE_SCALING, json.dumps(self.config.rope_scaling))
                writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
            for tensor in self.tensors:
                # float32, as the library would take the shape for one of bytes with the dtype of the packed blocks
                writer.add_tensor_info(tensor.theirs, tensor.shape, np.dtype("float32"), tensor.num_bytes, tensor.kind)
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if scales:
                writer.write_tensor_data(factors)
            for tensor in self.tensors:
                writer.write_tensor_data(self._stored(tensor))
                progress(tensor.num_bytes)

    @contextlib.contextmanager
    def _writer(self) -> Iterator[Any]:
        writer = self._gguf.GGUFWriter(None, self.architecture)
        try:
            yield writer
        finally:
            writer.close()

    @property
    def _is_linear(self) -> bool:
        scaling = self.config.rope_scaling or {}
        return scaling.get("rope_type", scaling.get("type")) == "linear"

    def _add_fields(self, writer: Any) -> None:
        config = self.config
        writer.add_name(self.model.path.absolute().name)
        writer.add_file_type(FILE_TYPES[self._dtype])
        writer.add_quantization_version(self._gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
        writer.add_rope_dimension_count(config.head_size)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if self._is_linear:
            writer.add_rope_scaling_type(self._gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(config.rope_scaling["factor"]))

    def _add_tokenizer(self, writer: Any, dialogue: Dialogue) -> None:
        vocabulary = self.vocabulary
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(vocabulary.split)
        writer.add_token_list(vocabulary.tokens)
        kinds = [CONTROL if token in dialogue.control else kind for token, kind in enumerate(vocabulary.kinds)]
        writer.add_token_types(kinds)
        writer.add_token_merges(vocabulary.merges)
        writer.add_add_bos_token(dialogue.adds_bos)
        for add, token in (
            (writer.add_bos_token_id, dialogue.bos_id),
            (writer.add_eos_token_id, dialogue.eos_id),
            (writer.add_eot_token_id, dialogue.eot_id),
            (writer.add_eom_token_id, dialogue.eom_id),
            (writer.add_pad_token_id, dialogue.pad_id),
        ):
            if token is not None:
                add(token)
        if dialogue.chat_template is not None:
            writer.add_chat_template(dialogue.chat_template)

    def _stored(self, tensor: _Tensor) -> np.ndarray:
        names = self.model.family.names()
        kinds = self._gguf.GGMLQuantizationType
        value = self.model.read(tensor.ours)
        value = (value.T if names.is_linear(tensor.ours) else value).astype("float32")
        value = np.ascontiguousarray(names.hf_to_gguf(tensor.ours, value, self.config))
        count = count_nonfinite(value)
        refuse = nonfinite_handler(self.model, lambda ours: [ours])
        if count and refuse is not None and tensor.kind in (kinds.F32, kinds.F16, kinds.BF16):
            refuse(tensor.ours, count, value.size)
        if tensor.kind == kinds.F32:
            return value
        if tensor.kind == kinds.F16:
            with np.errstate(over="ignore"):
                half = value.astype("float16")
            if not np.array_equal(np.isfinite(half), np.isfinite(value)):
                raise UserError(f"{self.model.path}: {tensor.ours!r} has values too large for fp16; use --dtype bf16")
            return half
        if (count and tensor.kind != kinds.BF16) or not np.nanmax(np.abs(value), initial=0.0) <= max_magnitude(
            tensor.kind
        ):
            nonfinite = ""
            if count:
                nonfinite = f" ({count:,} of {value.size:,} are NaN or infinite)"
            raise UserError(
                f"{self.model.path}: {tensor.ours!r} has values that are not finite, or too large for the scales of "
                f"{tensor.kind.name}, which are fp16{nonfinite}; use --dtype bf16"
            )
        return quantised(value, tensor.kind)


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UserError(f"writing GGUF needs the package gguf; install it with: {install_command('gguf')}") from error
    return gguf
