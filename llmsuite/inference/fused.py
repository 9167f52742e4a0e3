"""Faster forms of layers for generation on one device: fewer and larger products, fewer small ops.

A pass over one new token reads every weight once and computes little with it, so on a CPU the overhead of ops decides.
Values are the same but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.devices.ops import DecoderWeights, Ops, rms_norm
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, LayerCache, RMSNorm, extend_cache
from llmsuite.typing import Tensor


@paddle.no_grad()
def fuse(model: CausalLM, live: Ops | None = None) -> None:
    """Replace the forward of layers by the forms below, for good; the model must not be sharded over ranks.

    Layers of other kinds, such as DeepSeek's attention, and layers that round their inputs stay as they are.

    Args:
        model: in evaluation mode.
        live: the device's operations, for a model that will not be exported as a program.
    """
    attentions = [module for module in model.sublayers() if isinstance(module, Attention)]
    if not all(_is_plain(m.q_proj, m.k_proj, m.v_proj) for m in attentions):
        attentions = []
    for module in attentions:
        module.__dict__["forward"] = FusedAttention(module).forward
    for module in model.sublayers():
        if isinstance(module, GatedMLP) and _is_plain(module.gate_proj, module.up_proj):
            module.__dict__["forward"] = FusedMLP(module).forward
        elif isinstance(module, RMSNorm) and module.norm is rms_norm and module.weight.place.is_cpu_place():
            module.norm = _rms_norm
        elif type(module).forward is DecoderLayer.forward:
            module.__dict__["forward"] = FusedLayer(module).forward
    if attentions:
        repeats = attentions[0].num_heads
        for name in ("layer_inputs", "layer_inputs_at"):
            model.__dict__[name] = _for_whole_heads(getattr(model, name), *repeats)
        model.__dict__["accepts_buffer"] = True
    if live is not None and live.next_logits is not None and (weights := _weights(model)) is not None:
        model.__dict__["next_logits"] = NextLogits(model, weights, live.next_logits)
    elif model.lm_head is None and model.model.embed_tokens.weight.place.is_cpu_place():
        model.__dict__["logits"] = TiedLogits(model.model.embed_tokens.weight)


def accepts_buffer(model: CausalLM) -> bool:
    """Whether the cache of a model may have spare columns; see `CausalLM.decode_step`."""
    return bool(model.__dict__.get("accepts_buffer"))


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
        return self._kernel(self._weights, x, cos, sin, padding, cache, filled)


def _weights(model: CausalLM) -> DecoderWeights | None:
    """The weights for a kernel of the whole decoder; None for a model that the kernel does not support."""
    own = (CausalLM.decode_step, CausalLM.embed_at, CausalLM.final_norm, CausalLM.logits)
    layers, norms, found = list(model.model.layers), [model.model.norm], []
    if not accepts_buffer(model) or any(getattr(type(model), form.__name__) is not form for form in own):
        return None
    mask = paddle.zeros([1, 1, 1, 1])
    if type(model).layer_inputs_at(model, paddle.zeros([1, 1], "int64"), mask, mask.dtype)[2] is not mask:
        return None  # it has a mask of its own, such as a window
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        if type(attention) is not Attention or type(mlp) is not GatedMLP or mlp.gate_proj is not None:
            return None
        if type(layer).forward is not DecoderLayer.forward or not _is_plain(attention.o_proj, mlp.down_proj):
            return None
        if any(matrix.bias is not None for matrix in (attention.o_proj, mlp.gate_up_proj, mlp.down_proj)):
            return None
        heads = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        norms += heads
        bias = [attention.qkv_proj.bias] if attention.qkv_proj.bias is not None else []
        found += [
            *(layer.input_layernorm.weight, attention.qkv_proj.weight, *bias, *(norm.weight for norm in heads)),
            *(attention.o_proj.weight, layer.post_attention_layernorm.weight),
            *(mlp.gate_up_proj.weight, mlp.down_proj.weight),
        ]
    is_tied, attention = model.lm_head is None, layers[0].self_attn
    if model.lm_head is not None and (not _is_plain(model.lm_head) or model.lm_head.bias is not None):
        return None
    if any(type(norm) is not RMSNorm or norm.eps != norms[0].eps for norm in norms):
        return None
    head = model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    if any(tensor.dtype != paddle.float32 or not tensor.is_contiguous() for tensor in (*found, head)):
        return None
    return DecoderWeights(
        layers=found,
        norm=model.model.norm.weight,
        head=head,
        eps=norms[0].eps,
        num_queries=attention.num_heads[0],
        has_bias=attention.qkv_proj.bias is not None,
        has_head_norms=attention.q_norm is not None,
        is_tied=is_tied,
    )


class FusedLayer:
    """`llmsuite.models.blocks.DecoderLayer` without the overhead of calling an `nn.Layer`."""

    def __init__(self, layer: DecoderLayer):
        self._layer = layer

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any = None
    ) -> tuple[Tensor, LayerCache]:
        """As `DecoderLayer.forward`."""
        own = self._layer
        attended, present = own.self_attn.forward(own.input_layernorm.forward(x), cos, sin, mask, past)
        x = x + attended
        return x + own.mlp.forward(own.post_attention_layernorm.forward(x)), present


class FusedAttention:
    """`llmsuite.models.blocks.Attention` with one projection, and queries and keys rotated together."""

    def __init__(self, attention: Attention):
        self._attention = attention
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        size = attention.head_size
        num_queries, num_keys = (p.weight.shape[1] // size for p in projections[:2])
        self._parts, self._shape = [num_queries, num_keys], [0, 0, num_queries + 2 * num_keys, size]
        attention.num_heads = (num_queries, num_keys)
        attention.qkv_proj = _joined(projections)
        if attention.interleaved:
            _reorder(attention.qkv_proj, halves_first(num_queries + num_keys, num_keys, size))
        attention.q_proj = attention.k_proj = attention.v_proj = None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any = None
    ) -> tuple[Tensor, LayerCache]:
        """As `Attention.forward`; cos and sin as `_for_whole_heads` makes them. The cache may have spare columns:
        then its third part is the index of the first one."""
        own = self._attention
        qkv = _product(own.qkv_proj, x).reshape(self._shape)
        rotated, v = qkv.split([sum(self._parts), self._parts[1]], 2)
        if own.q_norm is None or own.k_norm is None:
            rotated = _rotate(rotated, cos, sin)
            q, k = rotated.split(self._parts, 2)
        else:
            q, k = rotated.split(self._parts, 2)
            rotated = _rotate(paddle.concat([own.q_norm(q), own.k_norm(k)], 2), cos, sin)
            q, k = rotated.split(self._parts, 2)
        if past is not None and len(past) == 3:
            k, v = _written(k, v, *past)
        else:
            k, v = extend_cache(k, v, past, own.heads_first)
        return _product(own.o_proj, own.core(q, k, v, mask).reshape([0, 0, -1])), (k, v)


class FusedMLP:
    """`llmsuite.models.blocks.GatedMLP` with its first two matrices as one."""

    def __init__(self, mlp: GatedMLP):
        self._mlp = mlp
        mlp.gate_up_proj = _joined([mlp.gate_proj, mlp.up_proj])
        mlp.gate_proj = mlp.up_proj = None

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        return _product(self._mlp.down_proj, F.swiglu(_product(self._mlp.gate_up_proj, x)))


def _product(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer without the overhead of `nn.Linear` in Paddle 3.3.1: a third of its time for one token."""
    if not _is_plain(layer):
        return layer(x)
    product = paddle.matmul(x, layer.weight)
    return product if layer.bias is None else product + layer.bias


def _is_plain(*layers: nn.Linear) -> bool:
    return all(type(layer) is nn.Linear for layer in layers)


def _joined(layers: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several."""
    has_bias = layers[0].bias is not None
    with paddle.LazyGuard():
        joined = nn.Linear(1, 1, bias_attr=None if has_bias else False)
    joined.weight = _parameter(paddle.concat([layer.weight for layer in layers], 1))
    if has_bias:
        joined.bias = _parameter(paddle.concat([layer.bias for layer in layers]))
    return joined


def halves_first(num_rotated: int, num_values: int, size: int) -> Tensor:
    """Places of columns of interleaved heads, in the order of `blocks.halves`; behind them values stay as they are."""
    rotated = paddle.arange(num_rotated * size).reshape([num_rotated, size // 2, 2]).transpose([0, 2, 1]).flatten()
    return paddle.concat([rotated, paddle.arange(num_rotated * size, (num_rotated + num_values) * size)])


def _reorder(layer: nn.Linear, columns: Tensor) -> None:
    layer.weight = _parameter(layer.weight.index_select(columns, 1))
    if layer.bias is not None:
        layer.bias = _parameter(layer.bias.index_select(columns, 0))


def _parameter(value: Tensor) -> Any:
    parameter = paddle.create_parameter(value.shape, value.dtype, default_initializer=nn.initializer.Assign(value))
    parameter.stop_gradient = True
    return parameter


def _written(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, filled: int) -> LayerCache:
    """A cache with new keys and values, each [B, L, J, K], written to its spare columns."""
    columns = (slice(None), slice(None), slice(filled, filled + k.shape[1]))
    keys[columns], values[columns] = k.transpose([0, 2, 1, 3]), v.transpose([0, 2, 1, 3])
    return keys, values


def _for_whole_heads(layer_inputs: Any, num_queries: int, num_keys: int) -> Any:
    """Wraps the `layer_inputs` of a model: cos and sin are expanded to every element of every head, and for one new
    token the mask to every score, once a pass instead of in every layer."""

    def repeated(*args: Any) -> tuple[Tensor, ...]:
        cos, sin, mask, *further = layer_inputs(*args)
        heads = [1, 1, num_queries + num_keys, 1]
        cos, sin = (paddle.concat(halves, -1).tile(heads) for halves in ([cos, cos], [-sin, sin]))
        if mask is not None and mask.shape[2] == 1:
            mask = mask.unsqueeze(1).tile([1, num_keys, num_queries // num_keys, 1, 1])
        return cos, sin, mask, *further

    return repeated


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as `llmsuite.devices.ops.rotary`, with half as many ops. x, cos and sin [B, L, H, K]."""
    return x * cos + paddle.roll(x, x.shape[-1] // 2, -1) * sin


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm as `llmsuite.devices.ops.rms_norm`, by Paddle's op for L2 norms. The CPU kernel of
    `paddle.incubate.nn.functional.fused_rms_norm` is no choice: in the wheel of 3.3.1 it needs AVX-512."""
    size = x.shape[-1]
    return paddle._C_ops.norm(x, -1, eps * size, False)[0] * (weight * math.sqrt(size))


class TiedLogits:
    """`CausalLM.logits` with the matrix of the embedding.

    With a single row the product is twice as fast if the matrix is stored as [D, V] (MKL of Paddle 3.3.1), with more
    rows it is not: so a transposed copy is kept from the first single row on.
    """

    def __init__(self, weight: Tensor):
        self._weight = weight
        self._transposed: Tensor = None

    def forget(self) -> None:
        """The matrix has new values."""
        self._transposed = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        if not paddle.in_dynamic_mode() or list(hidden.shape[:-1]) != [1]:
            return paddle.matmul(hidden, self._weight, transpose_y=True)
        if self._transposed is None:
            self._transposed = self._weight.t().contiguous()
        return paddle.matmul(hidden, self._transposed)
