"""The ERNIE-4.5 decoder with experts for one card. `llmsuite.models.blocks` explains the forward pass."""

from __future__ import annotations

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm
from llmsuite.models.ernie_moe.config import ErnieMoeConfig
from llmsuite.models.experts import Experts
from llmsuite.models.moe import Gate, LayerWithoutExperts, MoE, MoELayer, MoELM


class ErnieGate(Gate):
    """The router: softmax scores, with a bias that affects only the choice of experts."""

    def __init__(self, config: ErnieMoeConfig):
        super().__init__(config.hidden_size, config.moe_num_experts, config.moe_k, is_normed=True)
        self.least = config.moe_norm_min
        self.add_bias([1, self.num_experts])  # HF's has two dims

    def total(self, weights: Tensor) -> Tensor:
        """Divisor [B, L, 1] of the weights, at least `moe_norm_min`."""
        return super().total(weights).clip(min=self.least)


def _layer(config: ErnieMoeConfig, ops: Ops, number: int) -> DecoderLayer:
    """Attention as in ERNIE without experts, and experts or a gated MLP."""
    around = (
        RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
        Attention(config, ops, interleaved=True),
        RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
    )
    if not config.has_experts(number):
        return LayerWithoutExperts(*around, GatedMLP(config.hidden_size, config.intermediate_size, ops))
    experts = Experts(config.moe_num_experts, config.hidden_size, config.moe_intermediate_size, ops)
    shared = GatedMLP(config.hidden_size, config.shared_size, ops) if config.shared_size else None
    return MoELayer(*around, MoE(ErnieGate(config), experts, shared))


class ErnieMoe(MoELM):
    """ERNIE-4.5 with experts."""

    def __init__(self, config: ErnieMoeConfig, ops: Ops):
        layers = [_layer(config, ops, i) for i in range(config.num_hidden_layers)]
        super().__init__(config, ops, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, ops))
