"""Shape spec of the ERNIE-4.5 (MoE) family (`llmsuite.models.shape_spec`). Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.ernie_moe.config import ErnieMoeConfig
from llmsuite.models.shape_spec import GatedMLP, LayerSpec, MoE, ShapeSpec


def shape_spec(config: ErnieMoeConfig) -> ShapeSpec:
    """Sizes of the parts of the ERNIE-4.5 model of a config."""
    attention = config.grouped_query(interleaved=True)
    dense = LayerSpec(attention=attention, mlp=GatedMLP(width=config.intermediate_size))
    mixture = MoE(
        experts=config.moe_num_experts,
        chosen=config.moe_k,
        width=config.moe_intermediate_size,
        shared_width=config.shared_size,
        normed=True,
        clipped=True,
    )
    routed = LayerSpec(attention=attention, mlp=mixture)
    layers = [routed if config.has_experts(i) else dense for i in range(config.num_hidden_layers)]
    return ShapeSpec(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=layers)
