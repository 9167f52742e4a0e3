"""A decoder with routed experts built from its description (`models.shape_spec`), for one card.

Attention is that of `models.dense`, experts and their layers are those of `models.moe`. `models.blocks` explains the
shapes and the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle import nn

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import DecoderLayer, GatedMLP
from llmsuite.models.decoder_config import DecoderConfig
from llmsuite.models.dense import Scaled, kind_of, make_attention, make_mlp, make_norm, with_masks
from llmsuite.models.experts import Experts
from llmsuite.models.moe import Gate, GatedSharedMoE, MoE, MoELayer, MoELM, MTPLayer
from llmsuite.models.shape_spec import GatedDelta, LayerSpec
from llmsuite.models.shape_spec import MoE as MoESpec


class SparseLM(MoELM):
    """A described decoder some of whose layers have experts."""

    def __init__(self, config: DecoderConfig, ops: Ops):
        spec = config.shape_spec()
        assert isinstance(self, Scaled) or not spec.is_scaled, f"{type(config).__name__}.network has to be scaled"
        ops = with_masks(ops, spec)
        kinds = spec.attention_kinds
        layers = [_make_layer(config, ops, layer, kinds, spec.has_states) for layer in spec.layers]
        norm = make_norm(spec.norm, config.hidden_size, config.norm_eps, ops)
        super().__init__(config, ops, layers, norm, kinds, gives_positions=spec.has_states)


class ScaledSparseLM(Scaled, SparseLM):
    """A described decoder with experts, with factors of the embedding and of the logits, and a cap of the logits."""


def _make_layer(
    config: DecoderConfig, ops: Ops, spec: LayerSpec, kinds: Sequence[tuple[int, int | None]], has_states: bool
) -> DecoderLayer:
    layer = _layer_of_parts(config, ops, spec)
    first = 3 * kind_of(spec, kinds)
    layer.attention_inputs = (first, first + 3)
    if isinstance(layer, MoELayer):  # the positions of tokens follow the inputs of other attention
        layer.num_inputs = 3 * len(kinds) + has_states
    if isinstance(spec.attention, GatedDelta):
        layer.keeps_state = True
        layer.attention_inputs = (first, first + 1)
    return layer


def _layer_of_parts(config: DecoderConfig, ops: Ops, spec: LayerSpec) -> DecoderLayer:
    assert spec.norms == "before", "layers with experts have norms before attention and MLP"
    first, second = (make_norm(spec.norm, config.hidden_size, config.norm_eps, ops) for _ in range(2))
    attention = make_attention(config, ops, spec)
    if not isinstance(spec.mlp, MoESpec):
        assert spec.residual_scale == 1.0, "only layers with experts have a factor of their residuals"
        return DecoderLayer(first, attention, second, make_mlp(config, ops, spec))
    mixture = make_mixture(config.hidden_size, ops, spec.mlp)
    if spec.is_mtp:
        size = config.hidden_size
        return MTPLayer(
            first, attention, second, mixture, size, lambda: make_norm(spec.norm, size, config.norm_eps, ops)
        )
    return MoELayer(first, attention, second, mixture, spec.residual_scale)


def make_mixture(hidden_size: int, ops: Ops, spec: MoESpec) -> nn.Layer:
    """The routed experts of a layer with their gate, and its shared ones."""
    gate = Gate(hidden_size, spec)
    experts = Experts(spec.experts, hidden_size, spec.width, ops, spec.biased, spec.clamp)
    if not spec.shared_width:
        return MoE(gate, experts)
    shared = GatedMLP(hidden_size, spec.shared_width, ops)
    if spec.shared_gated:
        return GatedSharedMoE(gate, experts, shared, hidden_size)
    return MoE(gate, experts, shared)
