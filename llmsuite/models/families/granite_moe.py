"""Granite 3 with experts: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from llmsuite.models.decoder_config import (
    SMALL,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.families.granite import ScaledConfig
from llmsuite.models.shape_spec import MoE, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(ScaledConfig):
    """Granite 3.x with experts. Names are those of HF's config.json."""

    family: ClassVar[str] = "granite_moe"
    network: ClassVar[str] = "llmsuite.models.sparse:ScaledSparseLM"
    experts_key: ClassVar[str] = "num_local_experts"
    chosen_key: ClassVar[str] = "num_experts_per_tok"
    architectures: ClassVar[Mapping[str, str]] = {"granitemoe": "GraniteMoeForCausalLM"}
    hf_parts: ClassVar[Mapping[str, str]] = {
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.experts.gate_proj": "block_sparse_moe.input_linear",
        "mlp.experts.up_proj": "block_sparse_moe.input_linear",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear",
    }

    model_type: Literal["granitemoe"] = "granitemoe"
    """The only one."""
    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    """Width of an expert."""
    num_hidden_layers: NumLayers = 32
    num_local_experts: PositiveInt = 8
    """Experts a token can be sent to."""
    num_experts_per_tok: PositiveInt = 2
    """Experts of a token."""
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    rms_norm_eps: PositiveFloat = 1e-6
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2

    has_gate_bias: ClassVar[bool] = False
    """True where experts are chosen with a bias."""

    def shape_spec(self) -> ShapeSpec:
        """A Granite with experts in each layer; the weights of a token's experts add up to 1."""
        mixture = MoE(
            experts=self.num_local_experts,
            chosen=self.num_experts_per_tok,
            width=self.intermediate_size,
            shared_width=0,
            normed=True,
        )
        return self.scaled_decoder(mixture, biased=self.attention_bias)


_3_1 = {
    "vocab_size": 49155,
    "intermediate_size": 512,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1500000.0,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

# huggingface.co/ibm-granite/granite-3.1-1b-a400m-instruct, granite-3.1-3b-a800m-instruct, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "granite-3.1-1b-a400m": {
        **_3_1,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_local_experts": 32,
    },
    "granite-3.1-3b-a800m": {
        **_3_1,
        "hidden_size": 1536,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_local_experts": 40,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.5,
    "logits_scaling": 1.25,
}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
