"""A kernel that computes the full decoder for one new token of each row: supported models, weights, and its call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.adapters.layers.reft import edited
from llmsuite.base.typing import Tensor
from llmsuite.devices.decoder_weights import FLOATS, Codes, DecoderWeights
from llmsuite.inference.packed_layers import PackedEmbedding, PackedLinear, PackedTiedHead
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, RMSNorm, RotaryLM
from llmsuite.models.exact import has_hooks, is_exactly, is_own
from llmsuite.models.linear import has_own_kernel, is_matrix


class NextLogits:
    """Logits of one new token of each row, by a kernel for the full decoder."""

    def __init__(self, model: CausalLM, weights: DecoderWeights, kernel: Any):
        self._model = model
        self._weights = weights
        self._kernel = kernel

    def __call__(self, ids: Tensor, padding: Tensor, cache: Sequence[Tensor], filled: int) -> Tensor:
        """Decode one token.

        Args:
            ids: [B, 1].
            padding: [B], number of padding positions at the beginning of each row.
            cache: with spare positions; keys and values of `ids` are written to it.
            filled: filled positions of the cache.

        Returns:
            Logits [B, V].
        """
        positions = filled - padding.unsqueeze(1)
        x = self._model.embed_at(ids, positions).squeeze(1)
        model = self._model
        # the model's own method: its `input_form` expands cos and sin to every head
        cos, sin, _ = model.layer_inputs_at(positions, None, x.dtype)
        if model.window is not None:
            padding = padding.clip(min=filled + 1 - model.window)  # the kernel skips positions before the window
        return self._kernel(self._weights, x, cos, sin, padding, cache, filled)


def unsupported_reason(model: CausalLM) -> str | None:
    """The reason why the kernel for the full decoder does not support a model; None if it does. The model may be lazy,
    without memory."""
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
    """The modification of a model with layers of llmsuite's classes that the kernel does not support; None for none."""
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


def decoder_weights(model: CausalLM) -> DecoderWeights | None:
    """The weights of a fused model that the kernel supports, see `unsupported_reason`; None for parameters whose dtype
    or layout it does not support."""
    layers = list(model.model.layers)
    found = list[Tensor]()
    for layer in layers:
        attention = layer.self_attn
        mlp = layer.mlp
        qkv = attention.qkv_proj
        heads = [norm.weight for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        found += [
            *(layer.input_layernorm.weight, _values(qkv), *([] if qkv.bias is None else [qkv.bias]), *heads),
            *(_values(attention.o_proj), layer.post_attention_layernorm.weight),
            *(_values(mlp.gate_up_proj), _values(mlp.down_proj)),
        ]
    attention = layers[0].self_attn
    words = model.model.embed_tokens if model.lm_head is None else model.lm_head
    if isinstance(model.tied_head, PackedTiedHead):  # also with an unpacked embedding
        words = model.tied_head.layer
    weights = DecoderWeights(
        layers=found,
        norm=model.model.norm.weight,
        head=_values(words),
        eps=model.model.norm.eps,
        num_queries=attention.num_heads[0],
        intermediate_size=_sizes(layers[0].mlp.down_proj)[0],
        vocab_size=_sizes(words)[1],
        codes=_codes(attention.o_proj),
        head_codes=_codes(words),
        has_bias=attention.qkv_proj.bias is not None,
        has_head_norms=attention.q_norm is not None,
        is_tied=model.lm_head is None,
    )
    kinds = (paddle.float32, paddle.uint8)
    if any(tensor.dtype not in kinds or not tensor.is_contiguous() for tensor in (*found, weights.head)):
        return None
    return weights


def _values(layer: Any) -> Tensor:
    return layer.matrix.bytes if isinstance(layer, (PackedLinear, PackedEmbedding)) else layer.weight


def _codes(layer: Any) -> Codes:
    return layer.matrix.codes if isinstance(layer, (PackedLinear, PackedEmbedding)) else FLOATS


def _sizes(layer: Any) -> tuple[int, int]:
    """Number of inputs and outputs; the outputs of an embedding are the vocabulary."""
    if isinstance(layer, (PackedLinear, PackedEmbedding)):
        return layer.matrix.num_inputs, layer.matrix.num_outputs
    first, second = layer.weight.shape
    return (second, first) if isinstance(layer, nn.Embedding) else (first, second)
