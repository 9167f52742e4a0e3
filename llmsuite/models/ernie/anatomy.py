"""The anatomy of an ERNIE-4.5 model, see `llmsuite.models.anatomy`. Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.anatomy import Anatomy, GatedMLP, GroupedQuery, LayerAnatomy
from llmsuite.models.ernie.config import ErnieConfig, ErnieShape


def attention_anatomy(config: ErnieShape, biased: bool = False) -> GroupedQuery:
    """Sizes of the attention of any ERNIE-4.5."""
    return GroupedQuery(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_size,
        biased=biased,
        output_biased=biased,
    )


def anatomy(config: ErnieConfig) -> Anatomy:
    """Sizes of the parts of an ERNIE-4.5 model of this shape."""
    mlp = GatedMLP(width=config.intermediate_size, biased=config.use_bias)
    layer = LayerAnatomy(attention=attention_anatomy(config, config.use_bias), mlp=mlp)
    return Anatomy(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=[layer] * config.num_hidden_layers)
