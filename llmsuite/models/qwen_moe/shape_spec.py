"""Shape spec of the Qwen MoE family (`llmsuite.models.shape_spec`). Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.qwen_moe.config import QwenMoeConfig
from llmsuite.models.shape_spec import GatedMLP, LayerSpec, MoE, ShapeSpec


def shape_spec(config: QwenMoeConfig) -> ShapeSpec:
    """Sizes of the parts of the Qwen model of a config."""
    attention = config.grouped_query(biased=config.has_qkv_bias, normed="heads" if config.has_head_norms else None)
    dense = LayerSpec(attention=attention, mlp=GatedMLP(width=config.intermediate_size))
    mixture = MoE(
        experts=config.num_experts,
        chosen=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        shared_width=config.shared_size,
        normed=config.norm_topk_prob,
        shared_gated=config.has_qkv_bias,
    )
    routed = LayerSpec(attention=attention, mlp=mixture)
    layers = [routed if config.has_experts(i) else dense for i in range(config.num_hidden_layers)]
    return ShapeSpec(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=layers)
