"""Shape spec of the ERNIE-4.5 family (`llmsuite.models.shape_spec`). Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.ernie.config import ErnieConfig, ErnieShape
from llmsuite.models.shape_spec import GatedMLP, GroupedQuery, LayerSpec, ShapeSpec


def attention_spec(config: ErnieShape, biased: bool = False) -> GroupedQuery:
    """Sizes of the attention of an ERNIE-4.5 model, with or without experts."""
    return GroupedQuery(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_size,
        biased=biased,
        output_biased=biased,
    )


def shape_spec(config: ErnieConfig) -> ShapeSpec:
    """Sizes of the parts of the ERNIE-4.5 model of a config."""
    mlp = GatedMLP(width=config.intermediate_size, biased=config.use_bias)
    layer = LayerSpec(attention=attention_spec(config, config.use_bias), mlp=mlp)
    return ShapeSpec(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=[layer] * config.num_hidden_layers)
