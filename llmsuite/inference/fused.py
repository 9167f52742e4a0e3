"""Faster forms of layers for generation on one device: fewer and larger products, fewer small ops.

A pass over one new token reads every weight once and computes little with it, so on a CPU the overhead of ops decides.
Values are the same but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.devices.ops import Ops, rms_norm
from llmsuite.devices.ops import joined_swiglu as plain_swiglu
from llmsuite.inference.fusible import attentions, called, is_gated_mlp, is_rms_norm
from llmsuite.inference.next_logits import NextLogits, decoder_weights, uncovered
from llmsuite.inference.prompt_pass import PromptPass, has_operands
from llmsuite.models.blocks import (
    Attention,
    CausalLM,
    DecoderLayer,
    GatedMLP,
    LayerCache,
    RMSNorm,
    extend_cache,
    halves_first,
)
from llmsuite.models.deepseek.layers import Attention as LatentAttention
from llmsuite.models.exact import has_hooks, is_exactly, is_plain
from llmsuite.typing import Tensor

JoinedSwiglu = Callable[[Tensor], Tensor]
"""As `Ops.joined_swiglu`."""
Operand = Callable[[Tensor], Tensor]
"""As `Ops.attention_operand`."""


@paddle.no_grad()
def fuse(
    model: CausalLM,
    live: Ops | None = None,
    cache_dtype: str | None = None,
    joined_swiglu: JoinedSwiglu = plain_swiglu,
    projected: Operand | None = None,
) -> None:
    """Replace the forward of layers by the forms below, for good; the model must not be sharded over ranks.

    Matrices that `stored.store` has joined are taken as they are. Layers of other kinds, such as DeepSeek's attention,
    layers that round their inputs, and those of others that derive from llmsuite's (`fusible`) stay as they are.

    Args:
        model: in evaluation mode.
        live: the device's operations, for a model that will not be exported as a program.
        cache_dtype: what keys and values are rounded to and kept in; None for the dtype they are computed in.
            Attentions that are not fused keep what they compute.
        joined_swiglu: that of MLPs whose gate and up have no bias; for a model that computes as one that is trained.
        projected: what is made of queries, keys and values without biases and norms; for such a model too.
    """
    has_kernels = live is not None and live.next_logits is not None and live.cached_attention is not None
    is_covered = has_kernels and uncovered(model) is None
    fused = attentions(model)
    cache_dtype = cache_dtype if fused else None
    for attention in fused:
        attention.__dict__["forward"] = FusedAttention(attention, cache_dtype, projected).forward
    model.__dict__["cache_dtype"] = cache_dtype
    for module in model.sublayers():
        if is_gated_mlp(module):
            module.__dict__["forward"] = FusedMLP(module, joined_swiglu).forward
        elif is_rms_norm(module) and module.norm is rms_norm and module.weight.place.is_cpu_place():
            module.norm = _rms_norm
        elif is_exactly(module, DecoderLayer):
            module.__dict__["forward"] = FusedLayer(module).forward
        elif isinstance(module, LatentAttention):
            module.keep_up_matrices()
    if fused:
        repeats = fused[0].num_heads
        for name in ("layer_inputs", "layer_inputs_at"):
            model.__dict__[name] = _for_whole_heads(getattr(model, name), *repeats)
        model.__dict__["accepts_buffer"] = True
    if is_covered and fused and (weights := decoder_weights(model)) is not None:
        assert live is not None
        model.__dict__["next_logits"] = NextLogits(model, weights, live.next_logits)
        model.__dict__["prompt_pass"] = PromptPass(model, live, cache_dtype)
    elif model.lm_head is None and type(model.model.embed_tokens) is nn.Embedding:
        if model.model.embed_tokens.weight.place.is_cpu_place() and "tied_logits" not in vars(model):
            model.__dict__["tied_logits"] = TiedLogits(model.model.embed_tokens.weight)


def layer_by_layer(model: CausalLM) -> None:
    """Let a fused model go without a kernel for the whole decoder, so that its modules can be seen."""
    for name in ("next_logits", "prompt_pass"):
        model.__dict__.pop(name, None)


def accepts_buffer(model: CausalLM) -> bool:
    """Whether the cache of a model may have spare columns; see `CausalLM.decode_step`."""
    return bool(model.__dict__.get("accepts_buffer"))


class FusedLayer:
    """`llmsuite.models.blocks.DecoderLayer` without the overhead of calling an `nn.Layer`."""

    def __init__(self, layer: DecoderLayer):
        self._layer = layer

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any = None
    ) -> tuple[Tensor, LayerCache]:
        """As `DecoderLayer.forward`."""
        own = self._layer
        attended, present = called(own.self_attn, called(own.input_layernorm, x), cos, sin, mask, past)
        x = x + attended
        return x + called(own.mlp, called(own.post_attention_layernorm, x)), present


class FusedAttention:
    """`llmsuite.models.blocks.Attention` with one projection, and queries and keys rotated together."""

    def __init__(self, attention: Attention, cache_dtype: str | None = None, projected: Operand | None = None):
        """`cache_dtype` and `projected`: as in `fuse`."""
        self._attention, self._cache_dtype = attention, cache_dtype
        size = attention.head_size
        if attention.q_proj is not None:
            projections = [attention.q_proj, attention.k_proj, attention.v_proj]
            attention.num_heads = tuple(p.weight.shape[1] // size for p in projections[:2])
            attention.qkv_proj = _joined(projections)
            if attention.interleaved:
                _reorder(attention.qkv_proj, halves_first(sum(attention.num_heads), attention.num_heads[1], size))
            attention.q_proj = attention.k_proj = attention.v_proj = None
        self._projected = projected if has_operands(attention) else None
        num_queries, num_keys = attention.num_heads
        self._parts, self._shape = [num_queries, num_keys], [0, 0, num_queries + 2 * num_keys, size]

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any = None
    ) -> tuple[Tensor, LayerCache]:
        """As `Attention.forward`; cos and sin as `_for_whole_heads` makes them. The cache may have spare columns:
        then its third part is the index of the first one."""
        if not paddle.in_dynamic_mode():
            return self._in_program(x, cos, sin, mask, past)
        own = self._attention
        qkv = _product(own.qkv_proj, x).reshape(self._shape)
        if self._projected is not None:
            qkv = self._projected(qkv)
        rotated, v = qkv.split([sum(self._parts), self._parts[1]], 2)
        if own.q_norm is None or own.k_norm is None:
            rotated = _rotate(rotated, cos, sin)
            q, k = rotated.split(self._parts, 2)
        else:
            q, k = rotated.split(self._parts, 2)
            rotated = _rotate(paddle.concat([own.q_norm(q), own.k_norm(k)], 2), cos, sin)
            q, k = rotated.split(self._parts, 2)
        if self._cache_dtype is not None:
            k, v = k.astype(self._cache_dtype), v.astype(self._cache_dtype)
        if past is not None and len(past) == 3:
            k, v = _written(k, v, *past)
        else:
            k, v = extend_cache(k, v, past, own.heads_first)
        keys, values = k, v
        if self._cache_dtype is not None:  # so what is new is seen as it is kept, whatever is in the cache already
            keys, values = k.astype(q.dtype), v.astype(q.dtype)
        return _product(own.o_proj, own.core(q, keys, values, mask).reshape([0, 0, -1])), (k, v)

    def _in_program(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: Any) -> tuple[Tensor, LayerCache]:
        """The same with as few operations as there can be: in a pass over one token each takes longer to start than to
        compute, and one that asks for a size is two or three. cos, sin and mask as `_for_programs` makes them."""
        own, (num_queries, num_keys) = self._attention, self._parts
        assert own.heads_first
        assert self._cache_dtype is None
        width = own.head_size
        qkv = _product(own.qkv_proj, x).reshape(self._shape).transpose([0, 2, 1, 3])
        rotated, v = qkv.split([num_queries + num_keys, num_keys], 1)
        if own.q_norm is not None and own.k_norm is not None:
            q, k = rotated.split([num_queries, num_keys], 1)
            rotated = paddle.concat([own.q_norm(q), own.k_norm(k)], 1)
        q, k = _rotate(rotated, cos, sin).split([num_queries, num_keys], 1)
        if past is not None:
            k, v = (paddle.concat([before, new], 2) for before, new in zip(past, (k, v)))
        # the queries of a group are laid end to end: one product a group
        scores = paddle.matmul(q.reshape([0, num_keys, -1, width]), k, transpose_y=True) + mask
        out = paddle.matmul(F.softmax(scores, -1), v).reshape([0, num_queries, -1, width])
        out = out.transpose([0, 2, 1, 3]).reshape([0, 0, num_queries * width])
        return _product(own.o_proj, out), (k, v)


class FusedMLP:
    """`llmsuite.models.blocks.GatedMLP` with its first two matrices as one."""

    def __init__(self, mlp: GatedMLP, joined_swiglu: JoinedSwiglu = plain_swiglu):
        """`joined_swiglu`: as in `fuse`."""
        self._mlp = mlp
        if mlp.gate_proj is not None:
            mlp.gate_up_proj = _joined([mlp.gate_proj, mlp.up_proj])
            mlp.gate_proj = mlp.up_proj = None
        self._swiglu = joined_swiglu if mlp.gate_up_proj.bias is None else plain_swiglu

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        return _product(self._mlp.down_proj, self._swiglu(_product(self._mlp.gate_up_proj, x)))


def _product(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer without the overhead of `nn.Linear` in Paddle 3.3.1: a third of its time for one token."""
    if not is_plain(layer) or has_hooks(layer):  # such as products in a device's form: `models.products`
        return layer(x)
    product = paddle.matmul(x, layer.weight)
    return product if layer.bias is None else product + layer.bias


def _joined(layers: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several."""
    has_bias = layers[0].bias is not None
    with paddle.LazyGuard():
        joined = nn.Linear(1, 1, bias_attr=None if has_bias else False)
    joined.weight = _parameter(paddle.concat([layer.weight for layer in layers], 1))
    if has_bias:
        joined.bias = _parameter(paddle.concat([layer.bias for layer in layers]))
    return joined


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
        if not paddle.in_dynamic_mode():
            return *_for_programs(cos, sin, mask, num_queries, num_keys), *further
        heads = [1, 1, num_queries + num_keys, 1]
        cos, sin = (paddle.concat(halves, -1).tile(heads) for halves in ([cos, cos], [-sin, sin]))
        if mask is not None and mask.shape[2] == 1:
            mask = mask.unsqueeze(1).tile([1, num_keys, num_queries // num_keys, 1, 1])
        return cos, sin, mask, *further

    return repeated


def _for_programs(
    cos: Tensor, sin: Tensor, mask: Tensor, num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What attentions take in a program: cos and sin of every head, [B, H + J, L, K], those of queries times the scale
    of scores; the mask for queries of a group end to end, [B, J, H / J L, S]."""
    cos, sin = (paddle.concat(halves, -1).transpose([0, 2, 1, 3]) for halves in ([cos, cos], [-sin, sin]))
    scale = cos.shape[-1] ** -0.5
    cos, sin = (
        paddle.concat([(part * scale).tile([1, num_queries, 1, 1]), part.tile([1, num_keys, 1, 1])], 1)
        for part in (cos, sin)
    )
    return cos, sin, mask.tile([1, num_keys, num_queries // num_keys, 1])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as `llmsuite.devices.ops.rotary`, with half as many ops. x, cos and sin [B, L, H, K], or all of
    them [B, H, L, K]."""
    return x * cos + paddle.roll(x, x.shape[-1] // 2, -1) * sin


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm as `llmsuite.devices.ops.rms_norm`, by Paddle's op for L2 norms. The CPU kernel of
    `paddle.incubate.nn.functional.fused_rms_norm` is no choice: in the wheel of 3.3.1 it needs AVX-512."""
    size = x.shape[-1]
    return paddle._C_ops.norm(x, -1, eps * size, False)[0] * (weight * math.sqrt(size))


@paddle.no_grad()
def fold_gains(model: CausalLM) -> None:
    """Make the factor of each norm's gain (`_rms_norm`) part of its values, for a program, which would multiply them in
    every pass. The gain itself stays as it is, as others may read it."""
    for module in model.sublayers():
        if is_rms_norm(module) and module.norm is _rms_norm:
            module.__dict__["forward"] = FoldedNorm(module).forward


class FoldedNorm:
    """`llmsuite.models.blocks.RMSNorm` with a gain that is folded."""

    def __init__(self, norm: RMSNorm):
        self._norm = norm
        norm.folded = _parameter(norm.weight * math.sqrt(norm.weight.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        own = self._norm
        return paddle._C_ops.norm(x, -1, own.eps * x.shape[-1], False)[0] * own.folded


class TiedLogits:
    """`CausalLM.tied_logits`.

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
        if not paddle.in_dynamic_mode() and hidden.ndim == 2:  # the words as rows: with 8 rows 1.6 times as fast
            return paddle.matmul(self._weight, hidden, transpose_y=True).t()
        if not paddle.in_dynamic_mode() or list(hidden.shape[:-1]) != [1]:
            return paddle.matmul(hidden, self._weight, transpose_y=True)
        if self._transposed is None:
            self._transposed = self._weight.t().contiguous()
        return paddle.matmul(hidden, self._transposed)
