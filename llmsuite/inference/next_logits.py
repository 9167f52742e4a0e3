"""A kernel that takes one new token of each row through the whole decoder: which models it covers, and its call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.devices.decoder_weights import FLOATS, Codes, DecoderWeights
from llmsuite.inference.stored import StoredEmbedding, StoredLinear
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, RMSNorm
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
    if any(getattr(type(model), form.__name__) is not form for form in own):
        return "it embeds or decodes in a way of its own"
    mask = paddle.zeros([1, 1, 1, 1])
    inputs: Any = type(model).layer_inputs_at(model, paddle.zeros([1, 1], "int64"), mask, mask.dtype)
    if len(inputs) != 3 or inputs[2] is not mask:
        return "it has a mask or positions of its own"
    if any(type(getattr(layer, "mlp", None)) is not GatedMLP for layer in model.model.layers):
        return "it has layers with experts, or other MLPs"
    norms = [model.model.norm]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if type(layer).forward is not DecoderLayer.forward or type(attention) is not Attention:
            return "its layers or its attention are others"
        first = [attention.qkv_proj] if attention.q_proj is None else [getattr(attention, f"{p}_proj") for p in "qkv"]
        second = [mlp.gate_up_proj] if mlp.gate_proj is None else [mlp.gate_proj, mlp.up_proj]
        matrices = [attention.o_proj, *second, mlp.down_proj]
        if not _is_known(*first, *matrices):
            return "its layers round their inputs"
        if any(matrix.bias is not None for matrix in matrices):
            return "its layers have biases of outputs or of MLPs"
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if model.lm_head is not None and (not _is_known(model.lm_head) or model.lm_head.bias is not None):
        return "its head has a bias, or rounds its inputs"
    if any(type(norm) is not RMSNorm or norm.eps != norms[0].eps for norm in norms):
        return "its norms differ"
    return None


def decoder_weights(model: CausalLM) -> DecoderWeights | None:
    """The weights of a model whose attentions are fused, for the kernel; None for one that it does not support."""
    if uncovered(model) is not None:
        return None
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
    if isinstance(tied := model.__dict__.get("logits"), StoredLinear):  # which may be beside a plain embedding
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


def is_plain(*layers: Any) -> bool:
    """Whether these are linear layers and nothing more."""
    return all(type(layer) is nn.Linear for layer in layers)


def _is_known(*layers: Any) -> bool:
    return all(type(layer) in (nn.Linear, StoredLinear) for layer in layers)


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
