"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are kept compressed.

Shapes: B batch, L queries, S keys, D hidden, H heads, N and R the parts of a head without and with rotary positions
(nope and rope), V value head size, C width of compressed keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import LayerCache, RMSNorm, WithCore, dim_size, halves, linear
from llmsuite.models.exact import has_hooks
from llmsuite.models.linear import is_matrix, is_plain_linear
from llmsuite.models.shape_spec import Latent

_LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries, keys and values, whatever that of the other norms is."""


class LatentAttention(nn.Layer, WithCore):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are kept compressed."""

    never_packed = ("kv_b_proj",)  # multiplied by queries and by the output of attention, see `_absorbed`

    def __init__(self, hidden_size: int, ops: Ops, spec: Latent):
        super().__init__()
        self.ops = ops
        self.rotary = ops.rotary
        self.core = functools.partial(latent_attention, ops)
        self.can_absorb = ops.decoding.heads_first and not ops.matmuls.rounds_attention_inputs
        self.score_factor = spec.score_factor
        self.query_sizes = [spec.nope, spec.rope]
        self.latent_sizes = [spec.kv_rank, spec.rope]
        self.key_value_sizes = [spec.nope, spec.value]
        width = spec.heads * sum(self.query_sizes)
        self.is_compressed = spec.q_rank is not None
        if spec.q_rank is not None:
            self.q_a_proj = linear(hidden_size, spec.q_rank)
            self.q_a_layernorm = RMSNorm(spec.q_rank, _LATENT_EPS, ops)
            self.q_b_proj = linear(spec.q_rank, width)
        else:
            self.q_proj = linear(hidden_size, width)
        self.kv_a_proj_with_mqa = linear(hidden_size, sum(self.latent_sizes))
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, _LATENT_EPS, ops)
        self.kv_b_proj = linear(spec.kv_rank, spec.heads * sum(self.key_value_sizes))
        self.o_proj = linear(spec.heads * spec.value, hidden_size)
        self.up_keys: Tensor | None
        self.up_values: Tensor | None
        for name in ("up_keys", "up_values"):  # see `keep_up_matrices`; buffers, so that a program is saved with them
            self.register_buffer(name, None)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D]; the cache holds compressed keys and values [B, S, C] and rotated keys [B, S, R]."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.is_compressed else self.q_proj(x)
        if self.score_factor != 1.0:
            q = q * self.score_factor
        q_nope, q_rope = q.reshape([0, 0, -1, sum(self.query_sizes)]).split(self.query_sizes, -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(self.latent_sizes, -1)
        latent = self.kv_a_layernorm(latent)
        q_rope = self.rotary(halves(q_rope), cos, sin)
        k_rope = self.rotary(halves(k_rope.unsqueeze(2)), cos, sin).squeeze(2)
        if past is not None:
            latent = paddle.concat([past[0], latent], 1)
            k_rope = paddle.concat([past[1], k_rope], 1)
        parts = q_nope, q_rope, latent, k_rope, mask
        absorbs = self._absorbs(dim_size(x, 1))
        if isinstance(absorbs, bool):
            out = self._absorbed(*parts) if absorbs else self._expanded(*parts)
        else:  # a program whose input leaves the number of new tokens open
            out = paddle.static.nn.cond(absorbs, lambda: self._absorbed(*parts), lambda: self._expanded(*parts))
        return self.o_proj(out.reshape([0, 0, -1])), (latent, k_rope)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """Output of all heads, [B, L, H, V], by expanding the compressed cache to full keys and values."""
        size = sum(self.key_value_sizes)
        num_heads = self.kv_b_proj.weight.shape[1] // size  # an int, also in programs that leave lengths open
        heads = self.kv_b_proj(latent).reshape([0, 0, num_heads, size])
        k_nope, v = heads.split(self.key_value_sizes, -1)
        return self.core(q_nope, q_rope, k_nope, k_rope.unsqueeze(2), v, mask)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """Output of all heads, [B, L, H, V], directly on the compressed keys and values."""
        of_keys = self.up_keys
        of_values = self.up_values
        if of_keys is None or of_values is None:
            of_keys, of_values = self._up_matrices()
        return absorbed_attention(self.ops, q_nope, q_rope, latent, k_rope, of_keys, of_values, mask)

    def _up_matrices(self) -> tuple[Tensor, Tensor]:
        return up_matrices(self.kv_b_proj.weight, self.latent_sizes[0], self.key_value_sizes)

    @paddle.no_grad()
    def keep_up_matrices(self) -> None:
        """Cache the matrices that `_absorbed` multiplies by: to compute them takes longer than to multiply one token.
        For generation; call it again when `kv_b_proj` has new values."""
        if self.can_absorb and is_matrix(self.kv_b_proj) and not self.kv_b_proj.weight.is_dist():
            self.up_keys, self.up_values = (matrix.contiguous() for matrix in self._up_matrices())

    def drop_up_matrices(self) -> None:
        """Drop the cached matrices: they are computed in each pass again."""
        self.up_keys = self.up_values = None

    def _has_own_core(self) -> bool:
        """True if `_absorbed` is equivalent to `_expanded`: neither this method nor the core of attention is
        replaced."""
        is_own_core = isinstance(self.core, functools.partial) and self.core.func is latent_attention
        return is_own_core and type(self)._expanded is LatentAttention._expanded

    def _absorbs(self, num_new: Any) -> Any:
        """True if so few tokens are new that attention on the compressed keys and values is less work than expanding
        the cache: a bool, or a tensor where `num_new` is one, as in a program."""
        matrix = self.kv_b_proj
        is_training = paddle.is_grad_enabled() if paddle.in_dynamic_mode() else self.training
        if not self.can_absorb or is_training or not self._has_own_core():
            return False
        if not is_plain_linear(matrix) or matrix.weight.is_dist() or has_hooks(matrix):
            return False  # an adapter, a shard, or a device's own matrix products
        # work per pair of tokens and head: on compressed keys and values, and on expanded ones
        compressed = 2 * self.latent_sizes[0]
        expanded = sum(self.key_value_sizes)
        return compressed <= expanded or num_new < self.latent_sizes[0] * expanded / (compressed - expanded)


def latent_attention(
    ops: Ops, q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """`Ops.attention` of heads that come in two parts, and of one rotated key for all heads.

    q_nope [B, L, H, N], q_rope [B, L, H, R], k_nope [B, S, H, N], k_rope [B, S, 1, R] and v [B, S, H, V] to
    [B, L, H, V].
    """
    # The zeros are sharded over tensor parallel ranks as the other heads are, and so is their sum with the shared key.
    # In `concat` without it, the key would lose the gradients of the other ranks' heads in a program (Paddle 3.3.1).
    shared = k_rope.expand([-1, -1, k_nope.shape[2], -1]) + paddle.zeros_like(k_nope[..., :1])
    q = paddle.concat([q_nope, q_rope], -1)
    k = paddle.concat([k_nope, shared], -1)
    if ops.decoding.heads_first:
        return ops.attention(q, k.transpose([0, 2, 1, 3]), v.transpose([0, 2, 1, 3]), mask)
    size = q.shape[-1]
    value_size = v.shape[-1]
    if size < value_size:  # kernels need one head size: zeros change neither scores nor outputs
        q = _append_zeros(q * (value_size / size) ** 0.5, v[..., size:])  # scores are divided by the root of the size
        k = _append_zeros(k, v[..., size:])
    elif value_size < size:
        v = _append_zeros(v, k[..., value_size:])
    return ops.attention(q, k, v, mask)[..., :value_size]


def _append_zeros(x: Tensor, like: Tensor) -> Tensor:
    return paddle.concat([x, paddle.zeros_like(like)], -1)


def absorbed_attention(
    ops: Ops,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    key_matrix: Tensor,
    value_matrix: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """`latent_attention` directly on compressed keys and values (weight absorption, section 2.1.2 of the paper): for
    generation, where the few queries and outputs are multiplied by the up-projections instead of the long cache. All
    heads share the compressed keys and values.

    q_nope [B, L, H, N], q_rope [B, L, H, R], latent [B, S, C], k_rope [B, S, R], key_matrix [H, N, C] and value_matrix
    [H, C, V] to [B, L, H, V].
    """
    q = paddle.concat([_by_head(q_nope, key_matrix), q_rope], -1)
    size = q_nope.shape[-1] + q_rope.shape[-1]
    q = q * (q.shape[-1] / size) ** 0.5  # attention divides by the root of the new size: correct it to that of a head
    keys = paddle.concat([latent, k_rope], -1).unsqueeze(1)
    return _by_head(ops.attention(q, keys, latent.unsqueeze(1), mask), value_matrix)


def up_matrices(matrix: Tensor, rank: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The up-projection of compressed keys and values, [C, H (N + V)], as the two matrices that `absorbed_attention`
    takes: [H, N, C] and [H, C, V]. `rank` is C, `sizes` are N and V."""
    of_keys, of_values = matrix.reshape([rank, -1, sum(sizes)]).split(list(sizes), -1)
    return of_keys.transpose([1, 2, 0]), of_values.transpose([1, 0, 2])


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [B, L, H, I] times one matrix per head, [H, I, O], to [B, L, H, O]."""
    return paddle.matmul(x.transpose([0, 2, 1, 3]), matrices).transpose([0, 2, 1, 3])
