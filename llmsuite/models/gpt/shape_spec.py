"""Shape spec of the GPT family (`llmsuite.models.shape_spec`). Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.gpt.config import GPTConfig
from llmsuite.models.shape_spec import GeluMLP, GroupedQuery, LayerSpec, ShapeSpec


def shape_spec(config: GPTConfig) -> ShapeSpec:
    """Sizes of the parts of the GPT model of a config."""
    heads = config.num_attention_heads
    size = config.head_size
    attention = GroupedQuery(heads=heads, kv_heads=heads, head_size=size, rotary=False, biased=True, output_biased=True)
    layer = LayerSpec(attention=attention, mlp=GeluMLP(width=config.mlp_size), norm="layer")
    return ShapeSpec(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        layers=[layer] * config.num_hidden_layers,
        norm="layer",
        learned_positions=True,
    )
