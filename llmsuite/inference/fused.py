"""Kernels of layers for generation on one device: fewer and larger matmuls, fewer small ops.

A pass over one new token reads every weight once and computes little with it, so that on a CPU the overhead of ops
dominates. Values are the same except for rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.decoding_ops import joined_swiglu as plain_swiglu
from llmsuite.devices.ops import Ops, rms_norm
from llmsuite.inference.fusible import attentions, call_layer, is_gated_mlp, is_rms_norm, rounds_activations
from llmsuite.models.blocks import (
    Attention,
    CausalLM,
    DecoderLayer,
    DecodingKernels,
    GatedMLP,
    InputForm,
    LayerCache,
    RMSNorm,
    TiedHead,
    extend_cache,
    halves_first,
)
from llmsuite.models.embedding import is_plain_embedding
from llmsuite.models.exact import has_hooks, is_exactly
from llmsuite.models.latent_attention import LatentAttention
from llmsuite.models.linear import is_plain_linear

JoinedSwiglu = Callable[[Tensor], Tensor]
"""A `DecodingOps.joined_swiglu`."""
RoundQkv = Callable[[Tensor], Tensor]
"""A `MatmulOps.round_attention_input`."""


@paddle.no_grad()
def fuse(
    model: CausalLM,
    live: Ops | None = None,
    cache_dtype: str | None = None,
    joined_swiglu: JoinedSwiglu = plain_swiglu,
    round_qkv: RoundQkv | None = None,
) -> None:
    """Give the layers of a model the kernels below, irreversibly; the model must not be sharded over ranks.

    Matrices that `pack_model.pack_matrices` has concatenated are used unchanged. Layers of other kinds stay unchanged:
    DeepSeek's attention, layers that round their inputs, and third-party layers that derive from llmsuite's
    (`fusible`).

    Args:
        model: in evaluation mode.
        live: the device's operations, for a model that will not be exported as a program.
        cache_dtype: dtype of keys and values in the cache; None for the dtype they are computed in. Attentions that are
            not fused keep the latter.
        joined_swiglu: SwiGLU of MLPs whose gate and up have no bias; for a rollout model, which computes as the trained
            one.
        round_qkv: rounds queries, keys and values without biases and norms; for a rollout model too.
    """
    decoder_for = None if live is None else live.decoding.decoder_for
    build_decoder = None if decoder_for is None else decoder_for(model)
    fused = attentions(model)
    cache_dtype = cache_dtype if fused else None
    for attention in fused:
        attention.kernel = FusedAttention(attention, cache_dtype, round_qkv)
    for module in model.sublayers():
        if is_gated_mlp(module):
            module.kernel = FusedMLP(module, joined_swiglu)
        elif is_rms_norm(module) and module.norm is rms_norm and module.weight.place.is_cpu_place():
            module.norm = _rms_norm
        elif is_exactly(module, DecoderLayer):
            module.call = call_layer
        elif isinstance(module, LatentAttention):
            module.keep_up_matrices()
    if fused:
        model.input_form = ExpandedInputs(model.input_form, *fused[0].num_heads)
    model.decoding = DecodingKernels(accepts_buffer=bool(fused), cache_dtype=cache_dtype)
    decoder = build_decoder(live, cache_dtype) if build_decoder is not None and fused else None
    if decoder is not None:
        model.decoding = decoder
        return
    words = model.model.embed_tokens
    if model.lm_head is not None or not is_plain_embedding(words):
        return
    if words.weight.place.is_cpu_place() and type(model.tied_head) is TiedHead:
        model.tied_head = TransposedTiedHead()


def disable_decoder_kernels(model: CausalLM) -> None:
    """Disable the kernels that compute all layers of a fused model together, so that hooks of modules are called."""
    model.decoding = dataclasses.replace(model.decoding, next_logits=None, prefill=None)


class FusedAttention:
    """Kernel of `llmsuite.models.blocks.Attention` with one projection, which rotates queries and keys together."""

    def __init__(self, attention: Attention, cache_dtype: str | None = None, round_qkv: RoundQkv | None = None):
        """`cache_dtype` and `round_qkv` as for `fuse`."""
        self._attention = attention
        self._cache_dtype = cache_dtype
        size = attention.head_size
        if attention.q_proj is not None:
            projections = [attention.q_proj, attention.k_proj, attention.v_proj]
            attention.num_heads = tuple(p.weight.shape[1] // size for p in projections[:2])
            attention.qkv_proj = _concat_linears(projections)
            if attention.interleaved:
                _reorder(attention.qkv_proj, halves_first(sum(attention.num_heads), attention.num_heads[1], size))
            attention.q_proj = attention.k_proj = attention.v_proj = None
        self._round_qkv = round_qkv if rounds_activations(attention) else None
        num_queries, num_keys = attention.num_heads
        self._parts = [num_queries, num_keys]
        self._shape = [0, 0, num_queries + 2 * num_keys, size]

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any = None
    ) -> tuple[Tensor, LayerCache]:
        """Compute the attention, with the arguments and results of `Attention.forward`; cos and sin come from
        `ExpandedInputs`. The cache may have spare positions: then its third part is the index of the first one."""
        if not paddle.in_dynamic_mode():
            return self._in_program(x, cos, sin, mask, past)
        own = self._attention
        qkv = _linear_forward(own.qkv_proj, x).reshape(self._shape)
        if self._round_qkv is not None:
            qkv = self._round_qkv(qkv)
        rotated, v = qkv.split([sum(self._parts), self._parts[1]], 2)
        if own.q_norm is None or own.k_norm is None:
            rotated = _rotate(rotated, cos, sin)
            q, k = rotated.split(self._parts, 2)
        else:
            q, k = rotated.split(self._parts, 2)
            rotated = _rotate(paddle.concat([own.q_norm(q), own.k_norm(k)], 2), cos, sin)
            q, k = rotated.split(self._parts, 2)
        if self._cache_dtype is not None:
            k = k.astype(self._cache_dtype)
            v = v.astype(self._cache_dtype)
        if past is not None and len(past) == 3:
            k, v = _write_to_cache(k, v, *past)
        else:
            k, v = extend_cache(k, v, past, own.heads_first)
        keys = k
        values = v
        if (
            self._cache_dtype is not None
        ):  # new tokens attend to rounded values too: the result does not depend on chunks
            keys = k.astype(q.dtype)
            values = v.astype(q.dtype)
        return _linear_forward(own.o_proj, own.core(q, keys, values, mask).reshape([0, 0, -1])), (k, v)

    def _in_program(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: Any) -> tuple[Tensor, LayerCache]:
        """Compute the attention in a program, with as few operations as possible: in a pass over one token starting an
        operation takes longer than computing it, and one that needs a size is two or three. cos, sin and mask come from
        `_expand_for_programs`."""
        own = self._attention
        (num_queries, num_keys) = self._parts
        assert own.heads_first
        assert self._cache_dtype is None
        width = own.head_size
        qkv = _linear_forward(own.qkv_proj, x).reshape(self._shape).transpose([0, 2, 1, 3])
        rotated, v = qkv.split([num_queries + num_keys, num_keys], 1)
        if own.q_norm is not None and own.k_norm is not None:
            q, k = rotated.split([num_queries, num_keys], 1)
            rotated = paddle.concat([own.q_norm(q), own.k_norm(k)], 1)
        q, k = _rotate(rotated, cos, sin).split([num_queries, num_keys], 1)
        if past is not None:
            k, v = (paddle.concat([before, new], 2) for before, new in zip(past, (k, v)))
        # the queries of a group are laid end to end: one matmul for each group
        scores = paddle.matmul(q.reshape([0, num_keys, -1, width]), k, transpose_y=True) + mask
        out = paddle.matmul(F.softmax(scores, -1), v).reshape([0, num_queries, -1, width])
        out = out.transpose([0, 2, 1, 3]).reshape([0, 0, num_queries * width])
        return _linear_forward(own.o_proj, out), (k, v)


class FusedMLP:
    """Kernel of `llmsuite.models.blocks.GatedMLP` with its first two matrices concatenated."""

    def __init__(self, mlp: GatedMLP, joined_swiglu: JoinedSwiglu = plain_swiglu):
        """`joined_swiglu` as for `fuse`."""
        self._mlp = mlp
        if mlp.gate_proj is not None:
            mlp.gate_up_proj = _concat_linears([mlp.gate_proj, mlp.up_proj])
            mlp.gate_proj = mlp.up_proj = None
        self._swiglu = joined_swiglu if mlp.gate_up_proj.bias is None else plain_swiglu

    def __call__(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        return _linear_forward(self._mlp.down_proj, self._swiglu(_linear_forward(self._mlp.gate_up_proj, x)))


def _linear_forward(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer without the overhead of `nn.Linear` in Paddle 3.3.1: a third of its time for one token."""
    if not is_plain_linear(layer) or has_hooks(layer):  # such as a layer with a device's matmul: `models.linear_ops`
        return layer(x)
    y = paddle.matmul(x, layer.weight)
    return y if layer.bias is None else y + layer.bias


def _concat_linears(layers: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several layers."""
    has_bias = layers[0].bias is not None
    with paddle.LazyGuard():  # its own weight takes no memory, as it is replaced
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


def _write_to_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, filled: int) -> LayerCache:
    """Write new keys and values, each [B, L, J, K], to the spare positions of a cache, and return it."""
    spare = (slice(None), slice(None), slice(filled, filled + k.shape[1]))
    keys[spare] = k.transpose([0, 2, 1, 3])
    values[spare] = v.transpose([0, 2, 1, 3])
    return keys, values


class ExpandedInputs(InputForm):
    """Another form with cos and sin expanded to every element of every head, and for one new token the mask to every
    score: once in a pass instead of in every layer."""

    def __init__(self, inner: InputForm, num_queries: int, num_keys: int):
        """
        Args:
            inner: the other form.
            num_queries: H.
            num_keys: J.
        """
        self._inner = inner
        self._num_queries = num_queries
        self._num_keys = num_keys

    def embed(self, model: CausalLM, input_ids: Tensor, start: int, document_starts: Tensor | None) -> Tensor:
        return self._inner.embed(model, input_ids, start, document_starts)

    def initial_cache(self, model: CausalLM, num_rows: int) -> list[LayerCache] | None:
        return self._inner.initial_cache(model, num_rows)

    def layer_inputs(
        self, model: CausalLM, start: int, length: int, dtype: Any, document_starts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return self._expand(*self._inner.layer_inputs(model, start, length, dtype, document_starts))

    def layer_inputs_at(
        self, model: CausalLM, positions: Tensor, mask: Tensor, dtype: Any
    ) -> tuple[Tensor | None, ...]:
        return self._expand(*self._inner.layer_inputs_at(model, positions, mask, dtype))

    def _expand(self, cos: Tensor, sin: Tensor, mask: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
        num_queries = self._num_queries
        num_keys = self._num_keys
        if not paddle.in_dynamic_mode():
            return *_expand_for_programs(cos, sin, mask, num_queries, num_keys), *rest
        heads = [1, 1, num_queries + num_keys, 1]
        cos, sin = (paddle.concat(halves, -1).tile(heads) for halves in ([cos, cos], [-sin, sin]))
        if mask is not None and mask.shape[2] == 1:
            mask = mask.unsqueeze(1).tile([1, num_keys, num_queries // num_keys, 1, 1])
        return cos, sin, mask, *rest


def _expand_for_programs(
    cos: Tensor, sin: Tensor, mask: Tensor, num_queries: int, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of attentions in a program: cos and sin of every head, [B, H + J, L, K], those of queries times the
    scale of scores; the mask for queries of a group end to end, [B, J, H / J L, S]."""
    cos, sin = (paddle.concat(halves, -1).transpose([0, 2, 1, 3]) for halves in ([cos, cos], [-sin, sin]))
    scale = cos.shape[-1] ** -0.5
    cos, sin = (
        paddle.concat([(part * scale).tile([1, num_queries, 1, 1]), part.tile([1, num_keys, 1, 1])], 1)
        for part in (cos, sin)
    )
    return cos, sin, mask.tile([1, num_keys, num_queries // num_keys, 1])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding with half as many ops as `llmsuite.devices.ops.rotary`. x, cos and sin [B, L, H, K], or all of
    them [B, H, L, K]."""
    return x * cos + paddle.roll(x, x.shape[-1] // 2, -1) * sin


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm by Paddle's op for L2 norms, with the arguments of `llmsuite.devices.ops.rms_norm`. The CPU kernel of
    `paddle.incubate.nn.functional.fused_rms_norm` cannot be used: in the wheel of Paddle 3.3.1 it needs AVX-512."""
    size = x.shape[-1]
    # x / √(Σx² + ε D) · w √D is x / √(mean(x²) + ε) · w: the op adds its epsilon to the sum, not to the mean
    return paddle._C_ops.norm(x, -1, eps * size, False)[0] * (weight * math.sqrt(size))


@paddle.no_grad()
def fold_norm_weights(model: CausalLM) -> None:
    """Multiply the factor √D of `_rms_norm` into the weight of each norm, for a program, which else would multiply them
    in every pass. The weight itself stays unchanged, because other code may read it."""
    for module in model.sublayers():
        if is_rms_norm(module) and module.norm is _rms_norm:
            module.norm = FoldedNorm(module)


class FoldedNorm:
    """`_rms_norm` with a weight that includes the factor √D."""

    def __init__(self, norm: RMSNorm):
        """`norm` gets that weight as another parameter, so that a program saves it."""
        norm.folded_weight = _parameter(norm.weight * math.sqrt(norm.weight.shape[-1]))
        self._norm = norm

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., D] to [..., D]; `weight` is the one without the factor."""
        return paddle._C_ops.norm(x, -1, eps * x.shape[-1], False)[0] * self._norm.folded_weight


class TransposedTiedHead(TiedHead):
    """A faster tied head.

    With a single row the matmul is twice as fast if the matrix is stored as [D, V] (MKL of Paddle 3.3.1), with more
    rows it is not: so a transposed copy is kept from the first single row on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._transposed: Tensor = None

    def clear_transposed(self) -> None:
        """Drop the transposed copy, because the matrix has new values."""
        self._transposed = None

    def __call__(self, hidden: Tensor, embedding: Any) -> Tensor:
        weight = embedding.weight
        if not paddle.in_dynamic_mode() and hidden.ndim == 2:  # the vocabulary as rows: 1.6 times as fast with 8 rows
            return paddle.matmul(weight, hidden, transpose_y=True).t()
        if not paddle.in_dynamic_mode() or list(hidden.shape[:-1]) != [1]:
            return paddle.matmul(hidden, weight, transpose_y=True)
        if self._transposed is None:
            self._transposed = weight.t().contiguous()
        return paddle.matmul(hidden, self._transposed)
