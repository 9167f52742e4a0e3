"""OLMo 2: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from llmsuite.models.decoder_config import (
    SMALL,
    DenseConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.shape_spec import ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoConfig(DenseConfig):
    """OLMo 2. Names are those of HF's config.json."""

    family: ClassVar[str] = "olmo"
    architectures: ClassVar[Mapping[str, str]] = {"olmo2": "Olmo2ForCausalLM"}
    uncut: ClassVar[str | None] = "an olmo norms all heads of queries, and of keys, together; use pipeline or sharding"
    hf_parts: ClassVar[Mapping[str, str]] = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }

    model_type: Literal["olmo2"] = "olmo2"
    """The only one."""
    vocab_size: PositiveInt = 50304
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: NumLayers = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = 50279
    pad_token_id: int | None = 1

    def shape_spec(self) -> ShapeSpec:
        """Norms after attention and MLP, and of all queries and all keys."""
        biased = self.attention_bias
        attention = self.grouped_query(normed="whole", biased=biased, output_biased=biased)
        return self.decoder(self.layer(attention, norms="after"))


def _olmo2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 100352,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
    }


# huggingface.co/allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B, OLMo-2-0325-32B, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "olmo-2-1b": _olmo2(2048, 8192, 16, 16, 16),
    "olmo-2-7b": _olmo2(4096, 11008, 32, 32, 32),
    "olmo-2-13b": _olmo2(5120, 13824, 40, 40, 40),
    "olmo-2-32b": _olmo2(5120, 27648, 64, 40, 8),
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {**SMALL}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
