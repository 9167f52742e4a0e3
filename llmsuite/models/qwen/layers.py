"""The Qwen decoder for one card. `llmsuite.models.blocks` explains the shapes and the forward pass."""

from __future__ import annotations

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm, RotaryLM
from llmsuite.models.qwen.config import QwenConfig


class QwenLayer(DecoderLayer):
    """Grouped-query attention, with biases (qwen2) or normed heads (qwen3), and a gated MLP."""

    def __init__(self, config: QwenConfig, ops: Ops):
        super().__init__(
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            Attention(config, ops, qkv_bias=config.has_qkv_bias, qk_norm=config.has_head_norms),
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            GatedMLP(config.hidden_size, config.intermediate_size, ops),
        )


class Qwen(RotaryLM):
    """Qwen2, Qwen2.5 and dense Qwen3."""

    def __init__(self, config: QwenConfig, ops: Ops):
        layers = [QwenLayer(config, ops) for _ in range(config.num_hidden_layers)]
        super().__init__(config, ops, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, ops))
