"""The anatomy of an ERNIE-4.5 model with experts, see `llmsuite.models.anatomy`. Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.anatomy import Anatomy, GatedMLP, LayerAnatomy, MoE
from llmsuite.models.ernie.anatomy import attention_anatomy
from llmsuite.models.ernie_moe.config import ErnieMoeConfig


def anatomy(config: ErnieMoeConfig) -> Anatomy:
    """Sizes of the parts of an ERNIE-4.5 model of this shape."""
    attention = attention_anatomy(config)
    dense = LayerAnatomy(attention=attention, mlp=GatedMLP(width=config.intermediate_size))
    mixture = MoE(
        experts=config.moe_num_experts,
        chosen=config.moe_k,
        width=config.moe_intermediate_size,
        shared_width=config.shared_size,
        normed=True,
        clipped=True,
    )
    routed = LayerAnatomy(attention=attention, mlp=mixture)
    layers = [routed if config.has_experts(i) else dense for i in range(config.num_hidden_layers)]
    return Anatomy(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=layers)
