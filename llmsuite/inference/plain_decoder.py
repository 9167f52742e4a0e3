"""Decoders that kernels for a full decoder support: those that are exactly llmsuite's, with grouped-query attention and
gated MLPs."""

from __future__ import annotations

from llmsuite.adapters.layers.reft import edited
from llmsuite.inference.packed_layers import PackedLinear
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, RMSNorm, RotaryLM
from llmsuite.models.exact import has_hooks, is_exactly, is_own
from llmsuite.models.linear import has_own_kernel, is_matrix


def unsupported_reason(model: CausalLM) -> str | None:
    """The reason why a model is no plain decoder; None if it is one. The model may be lazy, without memory; its layers
    are not fused yet."""
    own = (CausalLM.decode_step, CausalLM.embed_at, CausalLM.final_norm, CausalLM.logits)
    if any(getattr(type(model), form.__name__) is not form or form.__name__ in vars(model) for form in own):
        return "it embeds or decodes in a way of its own"
    if type(model).tied_logits is not CausalLM.tied_logits or not is_own(type(model.tied_head).__call__):
        return "it makes logits in a way of its own"
    if type(model).layer_inputs_at is not RotaryLM.layer_inputs_at or not is_own(type(model.input_form)):
        return "it has a mask or positions of its own"
    layers = list(model.model.layers)
    if any(not isinstance(layer, DecoderLayer) or type(layer.mlp) is not GatedMLP for layer in layers):
        return "it has layers with experts, or other MLPs"
    norms = [model.model.norm]
    for layer in layers:
        attention = layer.self_attn
        mlp = layer.mlp
        if not is_exactly(layer, DecoderLayer) or type(attention) is not Attention:
            return "its layers or its attention are others"
        first = [attention.q_proj, attention.k_proj, attention.v_proj]
        if attention.q_proj is None:
            first = [attention.qkv_proj]
        second = [mlp.gate_up_proj] if mlp.gate_proj is None else [mlp.gate_proj, mlp.up_proj]
        matrices = [attention.o_proj, *second, mlp.down_proj]
        if not all(is_matrix(matrix) or type(matrix) is PackedLinear for matrix in (*first, *matrices)):
            return "its layers round their inputs"
        if any(matrix.bias is not None for matrix in matrices):
            return "its layers have biases of outputs or of MLPs"
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    head = model.lm_head
    if head is not None and (not (is_matrix(head) or type(head) is PackedLinear) or head.bias is not None):
        return "its head has a bias, or rounds its inputs"
    if any(type(norm) is not RMSNorm or norm.eps != norms[0].eps for norm in norms):
        return "its norms differ"
    return _changed(model)


def _changed(model: CausalLM) -> str | None:
    """The modification of a model with layers of llmsuite's classes that makes it another decoder; None for none."""
    layers = list(model.model.layers)
    functions = [f for layer in layers for f in (layer.self_attn.core, layer.self_attn.rotary, layer.mlp.swiglu)]
    modules = [*model.sublayers()]
    functions += [module.norm for module in modules if type(module) is RMSNorm]
    if not all(is_own(function) for function in functions):
        return "its layers compute with functions of their own"
    own = [module for module in modules if "forward" in vars(module) or has_own_kernel(module)]
    has_kernels = any(layer.self_attn.kernel is not None or layer.mlp.kernel is not None for layer in layers)
    if has_kernels or any(module is not model.model.embed_tokens for module in own):
        return "its layers have code of their own"
    if has_hooks(*(module for module in modules if module is not model.model.embed_tokens), but=(edited,)):
        return "it has hooks"
    return None
