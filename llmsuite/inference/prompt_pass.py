"""The pass over several tokens of each row, such as a prompt or a piece of one, by the device's kernels: attention
computes no score that no token needs, and norms, rotation and attention use all threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP
from llmsuite.typing import Tensor


def has_operands(attention: Attention) -> bool:
    """Whether queries, keys and values of a fused attention are operands in training, where the device has those
    (`Ops.attends_operands`)."""
    return attention.qkv_proj.bias is None and attention.q_norm is None


class PromptPass:
    """`CausalLM.decode_step` of a model that `next_logits.decoder_weights` has weights of."""

    def __init__(self, model: CausalLM, live: Ops, cache_dtype: str | None = None):
        """`cache_dtype`: as in `fused.fuse`."""
        assert live.cached_attention is not None, "see `fused.fuse`"
        self._model, self._live, self._cache_dtype = model, live, cache_dtype
        self._attend = live.cached_attention

    def new_cache(self, num_rows: int, num_columns: int) -> list[Tensor]:
        """A cache of free columns: keys and values of each layer, [B, J, S, K] each."""
        attentions: list[Attention] = [layer.self_attn for layer in self._model.model.layers]
        dtype = self._cache_dtype or self._model.model.norm.weight.dtype
        shapes = [[num_rows, own.num_heads[1], num_columns, own.head_size] for own in attentions for _ in range(2)]
        return [paddle.zeros(shape, dtype) for shape in shapes]

    def __call__(self, ids: Tensor, padding: Tensor, cache: Sequence[Tensor], filled: int) -> Tensor:
        """Ids [B, L] behind the `filled` columns of a cache that has room for them, where they are written, to normed
        hidden states [B, L, D]; the first columns of each row, numbers [B], are padding."""
        model = self._model
        padding, columns = padding.unsqueeze(1), paddle.arange(filled, filled + ids.shape[1])
        positions = paddle.clip(columns - padding, min=0)
        x = model.embed_at(ids, positions)
        # the method of the class: the one of this model repeats them for every head
        cos, sin, _ = type(model).layer_inputs_at(model, positions, None, x.dtype)
        first = paddle.where(columns >= padding, padding, paddle.zeros_like(padding))
        if model.window is not None:
            first = paddle.maximum(first, columns - (model.window - 1))
        spans = paddle.stack([first] * 3, 1)
        for layer, keys, values in zip(model.model.layers, cache[::2], cache[1::2]):
            x = self._through(layer, x, cos, sin, spans, keys, values, filled)
        return self._normed(model.model.norm, x)

    def _through(
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
        qkv = attention.qkv_proj(self._normed(layer.input_layernorm, x)).reshape(heads)
        if self._live.attends_operands and has_operands(attention):
            qkv = self._live.attention_operand(qkv)
        q, k, v = qkv.split([num_queries, num_keys, num_keys], 2)
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = self._normed(attention.q_norm, q), self._normed(attention.k_norm, k)
        q, k = self._live.rotary(q, cos, sin), self._live.rotary(k, cos, sin)
        keys, values = self._kept(keys, k, filled), self._kept(values, v, filled)
        x = x + attention.o_proj(self._attend(q, keys, values, spans).reshape([0, 0, -1]))
        mlp: GatedMLP = layer.mlp
        both = mlp.gate_up_proj(self._normed(layer.post_attention_layernorm, x))
        return x + mlp.down_proj(self._live.joined_swiglu(both))

    def _kept(self, whole: Tensor, new: Tensor, filled: int) -> Tensor:
        """Write new keys or values [B, L, J, K] behind the filled columns of a cache; returns all of them, as they are
        kept, [B, J, S, K]."""
        end = filled + new.shape[1]
        whole[:, :, filled:end] = self._live.attention_operand(new).transpose([0, 2, 1, 3]).astype(whole.dtype)
        kept = whole[:, :, :end]  # a view
        return kept if kept.dtype == new.dtype else kept.astype(new.dtype)

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        return self._live.rms_norm(x, norm.weight, norm.eps)
