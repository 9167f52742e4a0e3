"""The ERNIE-4.5 decoder for one card. `llmsuite.models.blocks` explains the shapes and the forward pass."""

from __future__ import annotations

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm, RotaryLM
from llmsuite.models.ernie.config import ErnieConfig


class ErnieLayer(DecoderLayer):
    """Grouped-query attention whose rotary pairs are neighbours, not halves of a head, and a gated MLP."""

    def __init__(self, config: ErnieConfig, ops: Ops):
        super().__init__(
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            Attention(config, ops, qkv_bias=config.use_bias, o_bias=config.use_bias, interleaved=True),
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            GatedMLP(config.hidden_size, config.intermediate_size, ops, bias=config.use_bias),
        )


class Ernie(RotaryLM):
    """ERNIE-4.5 without experts."""

    def __init__(self, config: ErnieConfig, ops: Ops):
        layers = [ErnieLayer(config, ops) for _ in range(config.num_hidden_layers)]
        super().__init__(config, ops, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, ops))
