"""Detection of layers that have fused forms for generation: those that are exactly llmsuite's (`models.exact`)."""

from __future__ import annotations

import functools
from typing import Any

from paddle import nn

from llmsuite.adapters.layers.reft import edited
from llmsuite.devices.ops import rotary
from llmsuite.inference.attention import grouped_attention, rounded_grouped_attention
from llmsuite.inference.packed_layers import PackedLinear
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, RMSNorm, RotaryLM
from llmsuite.models.exact import has_hooks, is_exactly, is_own
from llmsuite.models.linear import is_plain_linear
from llmsuite.models.moe import MoELayer, MoELM

_DECODING = ("decode_step", "decode")
"""Methods that only pass the inputs of `layer_inputs` and `layer_inputs_at` on to the layers."""


def attentions(model: CausalLM) -> list[Attention]:
    """The attentions to fuse: of all layers or of none, because the model makes the inputs of all layers together."""
    kind = type(model)
    makes_inputs = kind.layer_inputs in (RotaryLM.layer_inputs, MoELM.layer_inputs)
    if not makes_inputs or kind.layer_inputs_at is not RotaryLM.layer_inputs_at or not is_own(type(model.input_form)):
        return []
    if any(getattr(kind, name) is not getattr(CausalLM, name) or name in vars(model) for name in _DECODING):
        return []
    layers = list(model.model.layers)
    if not all(_only_passes_inputs_on(layer) and is_attention(layer.self_attn) for layer in layers):
        return []
    return [layer.self_attn for layer in layers]


def _only_passes_inputs_on(layer: Any) -> bool:
    """True for a layer that passes its inputs to its attention, and does nothing else with them."""
    is_known = is_exactly(layer, DecoderLayer) or is_exactly(layer, MoELayer, "mlp_block")
    return is_known and not has_hooks(layer, but=(edited,))


def is_attention(module: Any) -> bool:
    """True for grouped-query attention that computes as `blocks.Attention` does, with plain matrices."""
    if not is_exactly(module, Attention) or module.kernel is not None:
        return False
    if module.rotary is not rotary or not _is_grouped(module.core):
        return False
    inputs = [module.qkv_proj] if module.q_proj is None else [module.q_proj, module.k_proj, module.v_proj]
    norms = [norm for norm in (module.q_norm, module.k_norm) if norm is not None]
    return _are_matrices(*inputs) and not has_hooks(module, *inputs, *norms)


def _is_grouped(core: Any) -> bool:
    is_rounded = isinstance(core, functools.partial) and core.func is rounded_grouped_attention
    return core is grouped_attention or is_rounded


def rounds_activations(attention: Attention) -> bool:
    """True for a fused attention whose queries, keys and values are rounded in training, where the device rounds them
    (`MatmulOps.rounds_attention`)."""
    return attention.qkv_proj.bias is None and attention.q_norm is None


def is_gated_mlp(module: Any) -> bool:
    """True for a gated MLP that computes as `blocks.GatedMLP` does, with llmsuite's SwiGLU and plain matrices."""
    if not is_exactly(module, GatedMLP) or module.kernel is not None or not is_own(module.swiglu):
        return False
    inputs = [module.gate_up_proj] if module.gate_proj is None else [module.gate_proj, module.up_proj]
    return _are_matrices(*inputs) and not has_hooks(*inputs)


def is_rms_norm(module: Any) -> bool:
    """True for a norm that computes as `blocks.RMSNorm` does."""
    return is_exactly(module, RMSNorm) and is_own(module.norm)


def _are_matrices(*layers: Any) -> bool:
    return is_plain_linear(*layers) or all(type(layer) is PackedLinear for layer in layers)


def call_layer(layer: nn.Layer, *inputs: Any) -> Any:
    """The output of a layer, without the overhead of calling an `nn.Layer` where it has no hooks."""
    is_hooked = layer._forward_pre_hooks or layer._forward_post_hooks
    if is_hooked or type(layer).__call__ is not nn.Layer.__call__:
        return layer(*inputs)
    return layer.forward(*inputs)
