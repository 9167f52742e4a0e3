"""Granite 3: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from llmsuite.models.decoder_config import (
    SMALL,
    DenseConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.shape_spec import GatedMLP, MoE, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledConfig(DenseConfig):
    """Shape of a decoder with the four factors of Granite."""

    embedding_multiplier: PositiveFloat = 1.0
    """Factor of the embedding."""
    attention_multiplier: PositiveFloat = 1.0
    """Factor of the scores, instead of 1 / sqrt(head size)."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor of the outputs of attention and MLP."""
    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits."""

    def scaled_decoder(self, mlp: GatedMLP | MoE, biased: bool) -> ShapeSpec:
        """A Llama with these factors; `biased` where queries, keys, values and the output of attention have biases."""
        attention = self.grouped_query(biased=biased, output_biased=biased, scale=self.attention_multiplier)
        return self.decoder(
            self.layer(attention, mlp, residual_scale=self.residual_multiplier),
            embedding_scale=self.embedding_multiplier,
            logit_scale=1.0 / self.logits_scaling,
        )


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(ScaledConfig):
    """Granite 3.x without experts. Names are those of HF's config.json."""

    family: ClassVar[str] = "granite"
    network: ClassVar[str] = "llmsuite.models.dense:ScaledLM"
    architectures: ClassVar[Mapping[str, str]] = {"granite": "GraniteForCausalLM"}

    model_type: Literal["granite"] = "granite"
    """The only one."""
    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: NumLayers = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    mlp_bias: bool = False
    """True where the matrices of the MLP have biases."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2

    def shape_spec(self) -> ShapeSpec:
        """A Llama with four factors."""
        mlp = GatedMLP(width=self.intermediate_size, biased=self.mlp_bias)
        return self.scaled_decoder(mlp, biased=self.attention_bias)


_3_3 = {
    "vocab_size": 49159,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

# huggingface.co/ibm-granite/granite-3.3-2b-instruct, granite-3.3-8b-instruct, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "granite-3.3-2b": {
        **_3_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "granite-3.3-8b": {
        **_3_3,
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16.0,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 2.0,
}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
