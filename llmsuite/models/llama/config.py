"""The shape of a Llama model, and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from llmsuite.errors import UserError
from llmsuite.models.decoder_config import GroupedQueryConfig, PositiveFloat, PositiveInt, in_written_order
from llmsuite.models.head import with_head


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(GroupedQueryConfig):
    """Llama 1, 2, 3.x and what shares their code (SmolLM2, TinyLlama …). Names are those of HF's config.json."""

    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 4096
    rms_norm_eps: PositiveFloat = 1e-5
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings"} as in Llama 3.1."""
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        if self.head_size > 4096:
            yield "head_dim", f"is {self.head_size} (hidden_size / num_attention_heads); at most 4096 is supported"
            return
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            yield "hidden_size", f"is {self.hidden_size}, not a multiple of num_attention_heads = {heads}"
        elif self.head_size % 2:
            yield "head_dim", f"is {self.head_size}; rotary positions need an even head size"
        yield from super().problems()

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
        return cls(**cls.hf_fields(data, cls.rope_theta))

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
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
