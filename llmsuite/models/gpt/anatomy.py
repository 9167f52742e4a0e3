"""The anatomy of a GPT model, see `llmsuite.models.anatomy`. Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.anatomy import Anatomy, GeluMLP, GroupedQuery, LayerAnatomy
from llmsuite.models.gpt.config import GPTConfig


def anatomy(config: GPTConfig) -> Anatomy:
    """Sizes of the parts of a GPT model of this shape."""
    heads = config.num_attention_heads
    size = config.head_size
    attention = GroupedQuery(heads=heads, kv_heads=heads, head_size=size, rotary=False, biased=True, output_biased=True)
    layer = LayerAnatomy(attention=attention, mlp=GeluMLP(width=config.mlp_size), norm="layer")
    return Anatomy(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        layers=[layer] * config.num_hidden_layers,
        norm="layer",
        learned_positions=True,
    )
