"""GLM-4.5: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Self

from llmsuite.models.decoder_config import (
    SMALL,
    NonNegativeInt,
    NumLayers,
    PartlyRotatedConfig,
    PositiveFloat,
    PositiveInt,
    RotaryPart,
    TokenId,
    group_problems,
    in_written_order,
)
from llmsuite.models.shape_spec import MoE, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmMoeConfig(PartlyRotatedConfig):
    """GLM-4.5 and GLM-4.6. Names are those of HF's config.json."""

    family: ClassVar[str] = "glm_moe"
    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    experts_key: ClassVar[str] = "n_routed_experts"
    names: ClassVar[str] = "llmsuite.models.dense_names:MTP_NAMES"
    architectures: ClassVar[Mapping[str, str]] = {"glm4_moe": "Glm4MoeForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

    model_type: Literal["glm4_moe"] = "glm4_moe"
    """The only one."""
    vocab_size: PositiveInt = 151552
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 10944
    """Width of the MLP of layers without experts."""
    moe_intermediate_size: PositiveInt = 1408
    """Width of an expert."""
    num_hidden_layers: NumLayers = 46
    first_k_dense_replace: NonNegativeInt = 1
    """Number of layers at the beginning that have no experts."""
    n_routed_experts: PositiveInt = 128
    """Experts a token can be sent to."""
    n_shared_experts: PositiveInt = 1
    """Experts every token goes through, computed as one MLP."""
    num_experts_per_tok: PositiveInt = 8
    """Routed experts of a token."""
    n_group: PositiveInt = 1
    """Groups the routed experts are in."""
    topk_group: PositiveInt = 1
    """Number of groups that the experts of a token can be in."""
    norm_topk_prob: bool = True
    """True where the weights of the chosen experts are made to add up to 1."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Factor of the weights of the chosen experts."""
    num_attention_heads: PositiveInt = 96
    num_key_value_heads: PositiveInt = 8
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = None
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    partial_rotary_factor: RotaryPart = 0.5
    attention_bias: bool = False
    """True where queries, keys and values have biases."""
    use_qk_norm: bool = False
    """True where each head of queries and keys is normed, before the rotation."""
    num_nextn_predict_layers: Annotated[int, Ge(0), Le(64)] = 0
    """Number of multi-token prediction layers after the others. One is trained with train.mtp_loss_weight; else they
    are copied unchanged from the source."""
    mtp: bool = False
    """True where these layers are a part of the model; see `llmsuite.models.mtp`."""
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = dataclasses.field(default_factory=lambda: [151329, 151336, 151338])
    pad_token_id: int | None = 151329

    has_gate_bias: ClassVar[bool] = True
    """True where experts are chosen with a bias."""

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, has experts."""
        return layer >= self.first_k_dense_replace

    def shape_spec(self) -> ShapeSpec:
        """Attention of a partly rotated Llama, and the experts of DeepSeek-V3 after the first layers."""
        attention = self.grouped_query(
            normed="heads" if self.use_qk_norm else None,
            biased=self.attention_bias,
        )
        mixture = MoE(
            experts=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=self.n_shared_experts * self.moe_intermediate_size,
            normed=self.norm_topk_prob,
            scores="sigmoid",
            choice_biased=True,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            factor=self.routed_scaling_factor,
        )
        return self.decoder(self.some_with_experts(attention, mixture))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        if self.first_k_dense_replace >= self.num_hidden_layers:
            layers = f"num_hidden_layers is {self.num_hidden_layers}"
            yield "first_k_dense_replace", f"is {self.first_k_dense_replace} and {layers}: no layer has experts"
        yield from group_problems(self, least=2)
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json."""
        return super().from_hf({**data, "num_nextn_predict_layers": data.get("num_nextn_predict_layers") or 0})


# huggingface.co/zai-org/GLM-4.5-Air, GLM-4.5, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "glm-4.5-air": {"head_dim": 128, "rope_theta": 1000000.0, "attention_bias": True},
    "glm-4.5": {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "routed_scaling_factor": 2.5,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "attention_bias": True,
}
"""Small enough for a laptop, with a layer of either kind; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias", "use_qk_norm", "norm_topk_prob")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
