"""MiniMax-M2: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Self

from llmsuite.base.errors import UserError
from llmsuite.base.strict_json import ABOVE_ZERO
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
from llmsuite.models.shape_spec import MoE, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class MinimaxConfig(PartlyRotatedConfig):
    """MiniMax-M2. Names are those of HF's config.json."""

    family: ClassVar[str] = "minimax"
    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    experts_key: ClassVar[str] = "num_local_experts"
    chosen_key: ClassVar[str] = "num_experts_per_tok"
    uncut: ClassVar[str | None] = (
        "a minimax norms all heads of queries, and of keys, together; use pipeline, experts or sharding"
    )
    architectures: ClassVar[Mapping[str, str]] = {"minimax_m2": "MiniMaxM2ForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "qk_norm_type": "per_layer",
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    # layers for multi-token prediction are announced, and not in the published files
    without_effect: ClassVar[tuple[str, ...]] = (
        "attn_type_list",
        "mlp_intermediate_size",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "rotary_dim",
        "shared_moe_mode",
        "sliding_window",
        "use_mtp",
    )
    hf_parts: ClassVar[Mapping[str, str]] = {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
    }

    model_type: Literal["minimax_m2"] = "minimax_m2"
    """The only one."""
    vocab_size: PositiveInt = 200064
    hidden_size: PositiveInt = 3072
    intermediate_size: PositiveInt = 1536
    """Width of an expert."""
    num_hidden_layers: NumLayers = 62
    num_local_experts: PositiveInt = 256
    """Experts a token can be sent to."""
    num_experts_per_tok: PositiveInt = 8
    """Experts of a token."""
    num_attention_heads: PositiveInt = 48
    num_key_value_heads: PositiveInt = 8
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = 128
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 196608
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: Annotated[float, Ge(1)] = 5000000.0
    partial_rotary_factor: RotaryPart = 1.0
    """Part of a head that is rotated: its first elements; rotary_dim / head_dim where config.json has that."""
    bos_token_id: TokenId | None = 200034
    eos_token_id: TokenId | list[TokenId] | None = 200020

    has_gate_bias: ClassVar[bool] = True
    """True where experts are chosen with a bias."""

    def shape_spec(self) -> ShapeSpec:
        """Norms of all queries and all keys; experts in each layer, chosen with a bias by a sigmoid."""
        mixture = MoE(
            experts=self.num_local_experts,
            chosen=self.num_experts_per_tok,
            width=self.intermediate_size,
            shared_width=0,
            normed=True,
            scores="sigmoid",
            choice_biased=True,
        )
        return self.decoder(self.layer(self.grouped_query(normed="whole"), mixture))

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json."""
        if set(data.get("attn_type_list") or [1]) != {1}:
            raise UserError("config.json: attn_type_list is not 1 for all layers; linear attention is not supported")
        if data.get("sliding_window") is not None:
            raise UserError(
                f"config.json: sliding_window is {data['sliding_window']}; the minimax family has no window"
            )
        rotated = data.get("rotary_dim")
        known = data.get("rope_parameters") or data
        if rotated is not None and "partial_rotary_factor" not in known:
            size = data.get("head_dim") or cls.head_dim
            for value in (rotated, size):
                if not ABOVE_ZERO.fits(value):
                    raise UserError(f"config.json: {value!r} is no size of a head; {ABOVE_ZERO.what} is needed")
            data = {**data, "partial_rotary_factor": rotated / size}
        return super().from_hf(data)

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers, and the code that was published with the model, read."""
        return {**super().to_hf(), "rotary_dim": self.rotary_size, "scoring_func": "sigmoid", "use_routing_bias": True}


# huggingface.co/MiniMaxAI/MiniMax-M2, config.json
PRESETS: dict[str, dict[str, Any]] = {"minimax-m2": {"partial_rotary_factor": 0.5}}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings",)
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
