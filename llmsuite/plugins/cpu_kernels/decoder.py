"""The decoder of a model: a kernel that computes all layers for one new token of each row, and a fused prefill.

Shapes: B batch, L new tokens of each row, S columns of the cache, H query heads, J key-value heads, K head size,
D hidden, F intermediate, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.decoding_ops import DecoderBuilder
from llmsuite.devices.ops import Ops
from llmsuite.inference.packed_layers import PackedEmbedding, PackedLinear, PackedTiedHead
from llmsuite.inference.plain_decoder import unsupported_reason
from llmsuite.models.blocks import CausalLM, DecodingKernels
from llmsuite.plugins.cpu_kernels.decoder_weights import FLOATS, Codes, DecoderWeights
from llmsuite.plugins.cpu_kernels.prefill import CachedAttention, FusedPrefill

NextLogitsOfWeights = Callable[[DecoderWeights, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor], int], Tensor]
"""One new token of each row through all layers: weights, embeddings [B, D], cos and sin [B, 1, 1, K / 2], numbers of
padding columns [B], a cache buffer with free columns, [B, J, S, K] float32 or bfloat16 each, and the number of columns
in use, to logits [B, V]. It writes keys and values, rounded as by `MatmulOps.round_attention_input`, into the cache."""


@dataclasses.dataclass(frozen=True)
class DecoderOps:
    """The operations of the decoder in a precision."""

    next_logits: NextLogitsOfWeights
    cached_attention: CachedAttention

    def decoder_for(self, model: CausalLM) -> DecoderBuilder | None:
        """`DecodingOps.decoder_for`."""
        if unsupported_reason(model) is not None:
            return None

        def build(live: Ops, cache_dtype: str | None) -> DecodingKernels | None:
            weights = decoder_weights(model)
            if weights is None:
                return None
            return DecodingKernels(
                next_logits=NextLogits(model, weights, self.next_logits),
                prefill=FusedPrefill(model, live, self.cached_attention, cache_dtype),
                accepts_buffer=True,
                cache_dtype=cache_dtype,
            )

        return build


class NextLogits:
    """Logits of one new token of each row, by a kernel for the full decoder."""

    def __init__(self, model: CausalLM, weights: DecoderWeights, kernel: NextLogitsOfWeights):
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
