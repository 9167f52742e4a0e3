"""The core of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed by a device's attention kernel.

Shapes: B batch, L queries, S keys, H heads, N and R the parts of a head without and with rotary positions, V value head
size, C width of compressed keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops


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
