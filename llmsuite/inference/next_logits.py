"""A kernel that takes one new token of each row through the whole decoder: which models it covers, and its call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.devices.decoder_weights import FLOATS, Codes, DecoderWeights
from llmsuite.inference.stored_layers import StoredEmbedding, StoredLinear
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, RMSNorm, RotaryLM
from llmsuite.models.exact import has_hooks, is_exactly, is_own
from llmsuite.models.reft import edited
from llmsuite.typing import Tensor


class NextLogits:
    """Logits of one new token of each row, by a kernel for the whole decoder."""

    def __init__(self, model: CausalLM, weights: DecoderWeights, kernel: Any):
        self._model, self._weights, self._kernel = model, weights, kernel

    def __call__(self, ids: Tensor, padding: Tensor, cache: Sequence[Tensor], filled: int) -> Tensor:
        """Ids [B, 1] behind the `filled` columns of a cache with spare columns to logits [B, V]."""
        positions = filled - padding.unsqueeze(1)
        x, model = self._model.embed_at(ids, positions).squeeze(1), self._model
        # the method of the class: the one of this model repeats them for every head
        cos, sin, _ = type(model).layer_inputs_at(model, positions, None, x.dtype)
        if model.window is not None:
            padding = padding.clip(min=filled + 1 - model.window)  # what the kernel passes over
        return self._kernel(self._weights, x, cos, sin, padding, cache, filled)


def uncovered(model: CausalLM) -> str | None:
    """What keeps a kernel for the whole decoder from a model, with memory or without; None if nothing does."""
    own = (CausalLM.decode_step, CausalLM.embed_at, CausalLM.final_norm, CausalLM.logits)
    if any(getattr(type(model), form.__name__) is not form or form.__name__ in vars(model) for form in own):
        return "it embeds or decodes in a way of its own"
    if type(model).tied_logits is not CausalLM.tied_logits:
        return "it makes logits in a way of its own"
    if type(model).layer_inputs_at is not RotaryLM.layer_inputs_at:
        return "it has a mask or positions of its own"
    layers = list(model.model.layers)
    if any(type(getattr(layer, "mlp", None)) is not GatedMLP for layer in layers):
        return "it has layers with experts, or other MLPs"
    norms = [model.model.norm]
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        if not is_exactly(layer, DecoderLayer) or type(attention) is not Attention:
            return "its layers or its attention are others"
        first = [attention.qkv_proj] if attention.q_proj is None else [getattr(attention, f"{p}_proj") for p in "qkv"]
        second = [mlp.gate_up_proj] if mlp.gate_proj is None else [mlp.gate_proj, mlp.up_proj]
        matrices = [attention.o_proj, *second, mlp.down_proj]
        if not all(type(matrix) in (nn.Linear, StoredLinear) for matrix in (*first, *matrices)):
            return "its layers round their inputs"
        if any(matrix.bias is not None for matrix in matrices):
            return "its layers have biases of outputs or of MLPs"
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    head = model.lm_head
    if head is not None and (type(head) not in (nn.Linear, StoredLinear) or head.bias is not None):
        return "its head has a bias, or rounds its inputs"
    if any(type(norm) is not RMSNorm or norm.eps != norms[0].eps for norm in norms):
        return "its norms differ"
    return _changed(model)


def _changed(model: CausalLM) -> str | None:
    """What somebody has changed of a model whose layers are of llmsuite's classes."""
    layers = list(model.model.layers)
    functions = [f for layer in layers for f in (layer.self_attn.core, layer.self_attn.rotary, layer.mlp.swiglu)]
    modules = [*model.sublayers()]
    functions += [module.norm for module in modules if type(module) is RMSNorm]
    if not all(is_own(function) for function in functions):
        return "its layers compute with functions of their own"
    if any("forward" in vars(module) for module in modules if module is not model.model.embed_tokens):
        return "its layers have code of their own"
    if has_hooks(*(module for module in modules if module is not model.model.embed_tokens), but=(edited,)):
        return "it has hooks"
    return None


def decoder_weights(model: CausalLM) -> DecoderWeights | None:
    """The weights of a fused model that nothing keeps the kernel from, see `uncovered`; None for parameters that it
    does not support."""
    layers, found = list(model.model.layers), list[Tensor]()
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = attention.qkv_proj
        heads = [norm.weight for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        found += [
            *(layer.input_layernorm.weight, _values(qkv), *([] if qkv.bias is None else [qkv.bias]), *heads),
            *(_values(attention.o_proj), layer.post_attention_layernorm.weight),
            *(_values(mlp.gate_up_proj), _values(mlp.down_proj)),
        ]
    attention, words = layers[0].self_attn, model.model.embed_tokens if model.lm_head is None else model.lm_head
    if isinstance(tied := model.__dict__.get("tied_logits"), StoredLinear):  # which may be beside a plain embedding
        words = tied
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
    return layer.matrix.bytes if isinstance(layer, (StoredLinear, StoredEmbedding)) else layer.weight


def _codes(layer: Any) -> Codes:
    return layer.matrix.codes if isinstance(layer, (StoredLinear, StoredEmbedding)) else FLOATS


def _sizes(layer: Any) -> tuple[int, int]:
    """Numbers of inputs and outputs; the outputs of an embedding are its words."""
    if isinstance(layer, (StoredLinear, StoredEmbedding)):
        return layer.matrix.num_inputs, layer.matrix.num_outputs
    first, second = layer.weight.shape
    return (second, first) if isinstance(layer, nn.Embedding) else (first, second)
