"""The shape of a Llama model, and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from llmsuite.errors import UserError
from llmsuite.models.head import Head, read_head, with_head
from llmsuite.models.rope import frequencies, read_hf

PositiveInt = Annotated[int, Gt(0), Le(1 << 30)]
PositiveFloat = Annotated[float, Gt(0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Llama 1, 2, 3.x and what shares their code (SmolLM2, TinyLlama …). Names are those of HF's config.json."""

    vocab_size: PositiveInt = 32000
    """Rows of the embedding."""
    hidden_size: PositiveInt = 4096
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 11008
    """Width of the MLP."""
    num_hidden_layers: PositiveInt = 32
    """Decoder layers."""
    num_attention_heads: PositiveInt = 32
    """Query heads."""
    num_key_value_heads: PositiveInt = 32
    """Key and value heads; fewer than query heads is grouped-query attention."""
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = None
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 4096
    """Longest sequence the model was made for."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Term under the root of RMSNorm."""
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings"} as in Llama 3.1."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial matrices."""
    bos_token_id: int | None = 1
    """Kept for config.json."""
    eos_token_id: int | list[int] | None = 2
    """Kept for config.json; generation stops at it."""
    head: Head = "language_model"
    """What is made of the hidden states."""

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.head_size > 4096:
            yield "head_dim", f"is {self.head_size} (hidden_size / num_attention_heads); at most 4096 is supported"
            return
        if self.head_dim is None and self.hidden_size % heads:
            yield "hidden_size", f"is {self.hidden_size}, not a multiple of num_attention_heads = {heads}"
        elif self.head_size % 2:
            yield "head_dim", f"is {self.head_size}; rotary positions need an even head size"
        if heads % kv_heads:
            yield "num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads = {heads}"
        try:
            self.rope_frequencies()
        except UserError as error:
            yield "rope_scaling", str(error)

    def rope_frequencies(self) -> list[float]:
        """Rotary frequency of each of the head_size / 2 pairs, in radians a position.

        Raises:
            UserError: rope_scaling is of a kind this family does not know, or lacks a key.
        """
        return frequencies(self.head_size, self.rope_theta, self.rope_scaling)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """From the content of a config.json, HF's or PaddleNLP's.

        Raises:
            UserError: it switches something on that this family does not have.
        """
        if data.get("attention_bias") or data.get("mlp_bias"):
            raise UserError("config.json: attention_bias and mlp_bias are not part of the llama family")
        activation = data.get("hidden_act", "silu")
        if activation != "silu":
            raise UserError(f"config.json: hidden_act is {activation!r}; the llama family has silu")
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["rope_theta"], values["rope_scaling"] = read_hf(data, cls.rope_theta)
        heads = values.get("num_attention_heads", cls.num_attention_heads)
        values.setdefault("num_key_value_heads", heads)
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
        return cls(**{**values, "head": read_head(data)})

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers and PaddleNLP read."""
        return with_head(
            self,
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_act": "silu",
                "attention_bias": False,
                "mlp_bias": False,
                **dataclasses.asdict(self),
                "head_dim": self.head_size,
                "torch_dtype": "float32",
            },
        )


_LLAMA_3_1 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}

_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}

# config.json of huggingface.co/huggyllama/llama-7b and llama-13b (facebook/llama-7b and 13b with PaddleNLP),
# meta-llama/Llama-2-7b-hf, Llama-2-13b-hf, Meta-Llama-3-8B, Llama-3.1-8B-Instruct, Llama-3.1-405B,
# HuggingFaceTB/SmolLM2-135M-Instruct
PRESETS: dict[str, dict[str, Any]] = {
    "llama-7b": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "llama-13b": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, **_13B},
    "llama-2-7b": {},
    "llama-2-13b": _13B,
    "llama-3-8b": {**_LLAMA_3_1, "intermediate_size": 14336, "max_position_embeddings": 8192, "rope_scaling": None},
    "llama-3.1-8b": {**_LLAMA_3_1, "intermediate_size": 14336},
    "llama-3.1-405b": {
        **_LLAMA_3_1,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "digits": {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Shapes as published in the config.json of each model; "digits" is ours, for data/digits."""

SMOKE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("tie_word_embeddings",)
"""What of a recipe's shape says which code runs."""
