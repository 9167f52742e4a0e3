"""The anatomy of a Qwen model, see `llmsuite.models.anatomy`. Imports no Paddle."""

from __future__ import annotations

from llmsuite.models.anatomy import Anatomy, GatedMLP, GroupedQuery, LayerAnatomy
from llmsuite.models.qwen.config import QwenConfig


def anatomy(config: QwenConfig) -> Anatomy:
    """Sizes of the parts of a Qwen model of this shape."""
    attention = GroupedQuery(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_size,
        normed=config.has_head_norms,
        biased=config.has_qkv_bias,
    )
    layer = LayerAnatomy(attention=attention, mlp=GatedMLP(width=config.intermediate_size))
    return Anatomy(hidden=config.hidden_size, vocabulary=config.vocab_size, layers=[layer] * config.num_hidden_layers)
