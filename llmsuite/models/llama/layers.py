"""The Llama decoder for one card. `llmsuite.models.blocks` explains the shapes and the forward pass."""

from __future__ import annotations

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm, RotaryLM
from llmsuite.models.llama.config import LlamaConfig


class LlamaLayer(DecoderLayer):
    """Grouped-query attention and a gated MLP."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__(
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            Attention(config, ops, qkv_bias=config.attention_bias, o_bias=config.attention_bias),
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            GatedMLP(config.hidden_size, config.intermediate_size, ops, bias=config.mlp_bias),
        )


class Llama(RotaryLM):
    """Llama 1, 2, 3.x and models with the same architecture."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        layers = [LlamaLayer(config, ops) for _ in range(config.num_hidden_layers)]
        super().__init__(config, ops, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, ops))
