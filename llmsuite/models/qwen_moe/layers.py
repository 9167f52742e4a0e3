"""The Qwen decoder with experts for one card. `llmsuite.models.blocks` explains the forward pass."""

from __future__ import annotations

import paddle.nn.functional as F
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, DecoderLayer, GatedMLP, RMSNorm, linear
from llmsuite.models.experts import Experts
from llmsuite.models.moe import Gate, LayerWithoutExperts, MoE, MoELayer, MoELM
from llmsuite.models.qwen_moe.config import QwenMoeConfig


class GatedSharedMoE(nn.Layer):
    """Routed experts, and a shared expert whose output has a weight for each token."""

    never_packed = ("shared_expert_gate",)

    def __init__(self, gate: Gate, experts: Experts, shared_expert: GatedMLP, hidden_size: int):
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_expert = shared_expert
        self.shared_expert_gate = linear(hidden_size, 1)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """[B, L, D] to [B, L, D]; `token_mask` as in `Gate.forward`."""
        routed = self.experts(x, *self.gate(x, token_mask))
        return routed + F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


def _layer(config: QwenMoeConfig, ops: Ops, number: int) -> DecoderLayer:
    """Grouped-query attention as in Qwen without experts, and experts or a gated MLP."""
    around = (
        RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
        Attention(config, ops, qkv_bias=config.has_qkv_bias, qk_norm=config.has_head_norms),
        RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
    )
    if not config.has_experts(number):
        return LayerWithoutExperts(*around, GatedMLP(config.hidden_size, config.intermediate_size, ops))
    gate = Gate(config.hidden_size, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob)
    experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, ops)
    if not config.shared_size:
        return MoELayer(*around, MoE(gate, experts))
    shared = GatedMLP(config.hidden_size, config.shared_size, ops)
    return MoELayer(*around, GatedSharedMoE(gate, experts, shared, config.hidden_size))


class QwenMoe(MoELM):
    """Qwen2-MoE and Qwen3-MoE."""

    def __init__(self, config: QwenMoeConfig, ops: Ops):
        layers = [_layer(config, ops, i) for i in range(config.num_hidden_layers)]
        super().__init__(config, ops, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, ops))
