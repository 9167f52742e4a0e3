"""The anatomy of a Llama model, see `llmsuite.models.anatomy`. Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.anatomy import Anatomy, GatedMLP, GroupedQuery, LayerAnatomy
from llmsuite.models.llama.config import LlamaConfig


def anatomy(config: LlamaConfig) -> Anatomy:
    """Sizes of the parts of a Llama model of this shape."""
    attention = GroupedQuery(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_size,
        biased=config.attention_bias,
        output_biased=config.attention_bias,
        window=config.sliding_window,
    )
    layer = LayerAnatomy(attention=attention, mlp=GatedMLP(width=config.intermediate_size, biased=config.mlp_bias))
    return Anatomy(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=[layer] * config.num_hidden_layers)
