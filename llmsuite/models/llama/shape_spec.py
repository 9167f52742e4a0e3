"""Shape spec of the Llama family (`llmsuite.models.shape_spec`). Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.llama.config import LlamaConfig
from llmsuite.models.shape_spec import GatedMLP, GroupedQuery, LayerSpec, ShapeSpec


def shape_spec(config: LlamaConfig) -> ShapeSpec:
    """Sizes of the parts of the Llama model of a config."""
    attention = GroupedQuery(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_size,
        biased=config.attention_bias,
        output_biased=config.attention_bias,
        window=config.sliding_window,
    )
    layer = LayerSpec(attention=attention, mlp=GatedMLP(width=config.intermediate_size, biased=config.mlp_bias))
    return ShapeSpec(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=[layer] * config.num_hidden_layers)
