"""Shape spec of the DeepSeek family (`llmsuite.models.shape_spec`). Imports no Paddle."""

from __future__ import annotations

import dataclasses

from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.shape_spec import GatedMLP, Latent, LayerSpec, MoE, ShapeSpec


def shape_spec(config: DeepSeekConfig) -> ShapeSpec:
    """Sizes of the parts of the DeepSeek model of a config."""
    attention = Latent(
        heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
    )
    dense = LayerSpec(attention=attention, mlp=GatedMLP(width=config.intermediate_size))
    routed = LayerSpec(attention=attention, mlp=mixture_spec(config))
    layers = [routed if config.has_experts(i) else dense for i in range(config.num_hidden_layers)]
    layers += [dataclasses.replace(routed, is_mtp=True)] * num_mtp_layers(config)
    return ShapeSpec(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=layers)


def mixture_spec(config: DeepSeekConfig) -> MoE:
    """The experts of a layer, and their router."""
    return MoE(
        experts=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        shared_width=config.shared_size,
        normed=config.norm_topk_prob,
        scores="sigmoid" if config.has_gate_bias else "softmax",
        choice_biased=config.has_gate_bias,
        groups=1 if config.topk_method == "greedy" else config.n_group,
        chosen_groups=config.topk_group,
        factor=config.routed_scaling_factor,
    )
