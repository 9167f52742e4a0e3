"""Shape spec of the Qwen family (`llmsuite.models.shape_spec`). Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.qwen.config import QwenConfig
from llmsuite.models.shape_spec import GatedMLP, GroupedQuery, LayerSpec, ShapeSpec


def shape_spec(config: QwenConfig) -> ShapeSpec:
    """Sizes of the parts of the Qwen model of a config."""
    attention = GroupedQuery(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_size,
        normed=config.has_head_norms,
        biased=config.has_qkv_bias,
    )
    layer = LayerSpec(attention=attention, mlp=GatedMLP(width=config.intermediate_size))
    return ShapeSpec(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=[layer] * config.num_hidden_layers)
