"""The pass over prompts, with which answers begin, by the device's kernels: attention computes no score that no token
needs, and norms, rotation and attention use all threads."""

from __future__ import annotations

from typing import Any

import paddle

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, LayerCache, extend_cache
from llmsuite.typing import Tensor


def has_operands(attention: Attention) -> bool:
    """Whether queries, keys and values of a fused attention are operands in training, where the device has those
    (`Ops.attends_operands`)."""
    return attention.qkv_proj.bias is None and attention.q_norm is None


class PromptPass:
    """`CausalLM.decode_step` without a cache, of a model that `next_logits.decoder_weights` has weights of."""

    def __init__(self, model: CausalLM, live: Ops, cache_dtype: str | None = None):
        """`cache_dtype`: as in `fused.fuse`."""
        self._model, self._live, self._cache_dtype = model, live, cache_dtype

    def __call__(self, ids: Tensor, padding: Tensor) -> tuple[Tensor, list[LayerCache]]:
        """Ids [B, L], padded on the left by numbers [B] of columns, to normed hidden states of the last column,
        [B, 1, D], and the cache."""
        model, columns = self._model, paddle.arange(ids.shape[1])
        padding = padding.unsqueeze(1)
        positions = paddle.clip(columns - padding, min=0)
        x = model.embed_at(ids, positions)
        # the method of the class: the one of this model repeats them for every head
        cos, sin, _ = type(model).layer_inputs_at(model, positions, None, x.dtype)
        # padding is a document of its own
        starts = paddle.where(columns >= padding, padding, paddle.zeros_like(padding))
        mask = self._live.document_mask(starts, x.dtype, model.window)
        cache = []
        for layer in model.model.layers:
            x, present = self._through(layer, x, cos, sin, mask)
            cache.append(present)
        return self._normed(model.model.norm, x[:, -1:]), cache

    def _through(
        self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> tuple[Tensor, LayerCache]:
        attention: Attention = layer.self_attn
        num_queries, num_keys = attention.num_heads
        heads = [0, 0, num_queries + 2 * num_keys, attention.head_size]
        qkv = attention.qkv_proj(self._normed(layer.input_layernorm, x)).reshape(heads)
        if self._live.attends_operands and has_operands(attention):
            qkv = self._live.attention_operand(qkv)
        q, k, v = qkv.split([num_queries, num_keys, num_keys], 2)
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = self._normed(attention.q_norm, q), self._normed(attention.k_norm, k)
        q, k = self._live.rotary(q, cos, sin), self._live.rotary(k, cos, sin)
        kept = k, v = self._live.attention_operand(k), self._live.attention_operand(v)
        if self._cache_dtype is not None:  # what is seen is what is kept
            kept = k.astype(self._cache_dtype), v.astype(self._cache_dtype)
            k, v = (part.astype(q.dtype) for part in kept)
        x = x + attention.o_proj(self._live.attention(q, k, v, mask).reshape([0, 0, -1]))
        mlp: GatedMLP = layer.mlp
        both = mlp.gate_up_proj(self._normed(layer.post_attention_layernorm, x))
        x = x + mlp.down_proj(self._live.joined_swiglu(both))
        return x, extend_cache(*kept, None, attention.heads_first)

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        return self._live.rms_norm(x, norm.weight, norm.eps)
