"""Fused prefill: the pass over several tokens of each row, such as a chunk of a prompt, by the device's kernels.
Attention skips masked scores, and norms, rotation and attention use all threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.inference.fusible import rounds_activations
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP

CachedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""`Ops.attention` of new tokens [B, L, H, K] to keys and values of a cache, [B, J, C, K] each, with spans [B, 3, L] as
of `llmsuite.devices.masks.document_spans`, and the number of filled positions, the new ones among them."""


class FusedPrefill:
    """`CausalLM.decode_step` of a model that `decoder.decoder_weights` has weights of."""

    def __init__(self, model: CausalLM, live: Ops, cached_attention: CachedAttention, cache_dtype: str | None = None):
        """
        Args:
            model: fused.
            live: the device's operations.
            cached_attention: the attention of the precision.
            cache_dtype: as for `llmsuite.inference.fused.fuse`.
        """
        self._model = model
        self._live = live
        self._cache_dtype = cache_dtype
        self._attend = cached_attention

    def new_cache(self, num_rows: int, cache_len: int) -> list[Tensor]:
        """An empty cache with room for `cache_len` positions: keys and values of each layer, [B, J, S, K] each."""
        dtype = self._cache_dtype or self._model.model.norm.weight.dtype
        buffers = []
        for layer in self._model.model.layers:
            attention: Attention = layer.self_attn
            shape = [num_rows, attention.num_heads[1], cache_len, attention.head_size]
            buffers += [paddle.zeros(shape, dtype), paddle.zeros(shape, dtype)]
        return buffers

    def __call__(self, ids: Tensor, padding: Tensor, cache: Sequence[Tensor], filled: int) -> Tensor:
        """Make one pass.

        Args:
            ids: [B, L], the tokens that follow the filled positions.
            padding: [B], number of padding positions at the beginning of each row.
            cache: keys and values of each layer, [B, J, S, K]; those of `ids` are written to it.
            filled: filled positions of the cache.

        Returns:
            Normed hidden states [B, L, D].
        """
        model = self._model
        padding = padding.unsqueeze(1)
        indices = paddle.arange(filled, filled + ids.shape[1])
        positions = paddle.clip(indices - padding, min=0)
        x = model.embed_at(ids, positions)
        # the model's own method: its `input_form` expands cos and sin to every head
        cos, sin, _ = model.layer_inputs_at(positions, None, x.dtype)
        first = paddle.where(indices >= padding, padding, paddle.zeros_like(padding))
        if model.window is not None:
            first = paddle.maximum(first, indices - (model.window - 1))
        spans = paddle.stack([first] * 3, 1)
        for layer, keys, values in zip(model.model.layers, cache[::2], cache[1::2]):
            x = self._layer(layer, x, cos, sin, spans, keys, values, filled)
        return self._norm(model.model.norm, x)

    def _layer(
        self,
        layer: DecoderLayer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        spans: Tensor,
        keys: Tensor,
        values: Tensor,
        filled: int,
    ) -> Tensor:
        attention: Attention = layer.self_attn
        num_queries, num_keys = attention.num_heads
        heads = [0, 0, num_queries + 2 * num_keys, attention.head_size]
        qkv = attention.qkv_proj(self._norm(layer.input_layernorm, x)).reshape(heads)
        if self._live.matmuls.rounds_attention and rounds_activations(attention):
            qkv = self._live.matmuls.round_attention_input(qkv)
        q, k, v = qkv.split([num_queries, num_keys, num_keys], 2)
        if attention.q_norm is not None and attention.k_norm is not None:
            q = self._norm(attention.q_norm, q)
            k = self._norm(attention.k_norm, k)
        q = self._live.rotary(q, cos, sin)
        k = self._live.rotary(k, cos, sin)
        keys = self._append(keys, k, filled)
        values = self._append(values, v, filled)
        attended = self._attend(q, keys, values, spans, filled + k.shape[1])
        x = x + attention.o_proj(attended.reshape([0, 0, -1]))
        mlp: GatedMLP = layer.mlp
        both = mlp.gate_up_proj(self._norm(layer.post_attention_layernorm, x))
        return x + mlp.down_proj(self._live.decoding.joined_swiglu(both))

    def _append(self, buffer: Tensor, new: Tensor, filled: int) -> Tensor:
        """Write new keys or values [B, L, J, K] after the filled positions of a cache; returns the cache, with all its
        room and rounded as it is, in the dtype of the new ones."""
        rounded = self._live.matmuls.round_attention_input(new).transpose([0, 2, 1, 3])
        buffer[:, :, filled : filled + new.shape[1]] = rounded.astype(buffer.dtype)
        return buffer if buffer.dtype == new.dtype else buffer.astype(new.dtype)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return self._live.rms_norm(x, norm.weight, norm.eps)
