"""GLM-4 (0414): its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from llmsuite.models.decoder_config import (
    SMALL,
    NumLayers,
    PartlyRotatedConfig,
    PositiveFloat,
    PositiveInt,
    RotaryPart,
    TokenId,
    in_written_order,
)
from llmsuite.models.shape_spec import ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmConfig(PartlyRotatedConfig):
    """GLM-4-0414 and GLM-Z1. Names are those of HF's config.json."""

    family: ClassVar[str] = "glm"
    architectures: ClassVar[Mapping[str, str]] = {"glm4": "Glm4ForCausalLM"}
    hf_parts: ClassVar[Mapping[str, str]] = {"mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}

    model_type: Literal["glm4"] = "glm4"
    """The only one."""
    vocab_size: PositiveInt = 151552
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 13696
    num_hidden_layers: NumLayers = 40
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt | None = 128
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 0.00000015625
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    partial_rotary_factor: RotaryPart = 0.5
    attention_bias: bool = True
    """True where queries, keys and values have biases."""
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = dataclasses.field(default_factory=lambda: [151329, 151336, 151338])
    pad_token_id: int | None = 151329

    def shape_spec(self) -> ShapeSpec:
        """Norms before and after attention and MLP; neighbours are rotated together, in the first part of a head."""
        attention = self.grouped_query(interleaved=True, biased=self.attention_bias)
        return self.decoder(self.layer(attention, norms="both"))


# huggingface.co/zai-org/GLM-4-9B-0414, GLM-4-32B-0414, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "glm-4-9b-0414": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "attention_bias": False},
    "glm-4-32b-0414": {
        "hidden_size": 6144,
        "intermediate_size": 23040,
        "num_hidden_layers": 61,
        "num_attention_heads": 48,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {**SMALL, "head_dim": 16, "attention_bias": True}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
