"""Seed-OSS: its config, its description and its published size. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from llmsuite.models.decoder_config import SMALL, DenseConfig, NumLayers, PositiveInt, TokenId, in_written_order
from llmsuite.models.shape_spec import GatedMLP, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DenseConfig):
    """Seed-OSS. Names are those of HF's config.json."""

    family: ClassVar[str] = "seed_oss"
    architectures: ClassVar[Mapping[str, str]] = {"seed_oss": "SeedOssForCausalLM"}
    without_effect: ClassVar[tuple[str, ...]] = ("residual_dropout",)

    model_type: Literal["seed_oss"] = "seed_oss"
    """The only one."""
    vocab_size: PositiveInt = 155136
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 27648
    num_hidden_layers: NumLayers = 64
    num_attention_heads: PositiveInt = 80
    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt | None = 128
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 524288
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    attention_bias: bool = True
    """True where queries, keys and values have biases."""
    attention_out_bias: bool = False
    """True where the output of attention has a bias."""
    mlp_bias: bool = False
    """True where the matrices of the MLP have biases."""
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 2
    pad_token_id: int | None = 1

    def shape_spec(self) -> ShapeSpec:
        """A Llama with biases of its own choice."""
        attention = self.grouped_query(biased=self.attention_bias, output_biased=self.attention_out_bias)
        return self.decoder(self.layer(attention, GatedMLP(width=self.intermediate_size, biased=self.mlp_bias)))


# huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct, config.json
PRESETS: dict[str, dict[str, Any]] = {"seed-oss-36b": {"hidden_size": 5120, "rope_theta": 10000000.0}}
"""Shape as published."""

SMOKE: dict[str, Any] = {**SMALL, "head_dim": 16}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
