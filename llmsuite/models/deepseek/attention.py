"""The core of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), by the attention that a device has.

Shapes: B batch, L queries, S keys, H heads, N and R the parts of a head without and with rotary positions, V value head
size, C width of compressed keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from llmsuite.devices.ops import Ops
from llmsuite.typing import Tensor


def latent_attention(
    ops: Ops, q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """`Ops.attention` of heads that come in two parts, and of one rotated key for all heads.

    q_nope [B, L, H, N], q_rope [B, L, H, R], k_nope [B, S, H, N], k_rope [B, S, 1, R] and v [B, S, H, V] to
    [B, L, H, V].
    """
    # The zeros are split over tensor parallel ranks as the other heads are, and the sum splits the shared key likewise.
    # Left to `concat`, the key would lose the gradients of the other ranks' heads in a program (Paddle 3.3.1).
    shared = k_rope.expand([-1, -1, k_nope.shape[2], -1]) + paddle.zeros_like(k_nope[..., :1])
    q, k = paddle.concat([q_nope, q_rope], -1), paddle.concat([k_nope, shared], -1)
    if ops.heads_first:
        return ops.attention(q, k.transpose([0, 2, 1, 3]), v.transpose([0, 2, 1, 3]), mask)
    size, value_size = q.shape[-1], v.shape[-1]
    if size < value_size:  # kernels take heads of one size: zeros change neither scores nor outputs
        q, k = (_beside_zeros(x, v[..., size:]) for x in (q * (value_size / size) ** 0.5, k))
    elif value_size < size:
        v = _beside_zeros(v, k[..., value_size:])
    return ops.attention(q, k, v, mask)[..., :value_size]


def _beside_zeros(x: Tensor, like: Tensor) -> Tensor:
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
    """`latent_attention` to compressed keys and values: for generation, whose few queries and outputs are multiplied
    with the matrices in place of the long cache (section 2.1.2 of the paper). All heads share what they attend to.

    q_nope [B, L, H, N], q_rope [B, L, H, R], latent [B, S, C], k_rope [B, S, R], key_matrix [H, N, C] and value_matrix
    [H, C, V] to [B, L, H, V].
    """
    q = paddle.concat([_by_head(q_nope, key_matrix), q_rope], -1)
    size = q_nope.shape[-1] + q_rope.shape[-1]
    q = q * (q.shape[-1] / size) ** 0.5  # scores are divided by the root of the size of a head as it was
    keys = paddle.concat([latent, k_rope], -1).unsqueeze(1)
    return _by_head(ops.attention(q, keys, latent.unsqueeze(1), mask), value_matrix)


def up_matrices(matrix: Tensor, rank: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The matrix that makes whole keys and values of compressed ones, [C, H (N + V)], as `absorbed_attention` takes it:
    [H, N, C] and [H, C, V]. `rank` is C, `sizes` are N and V."""
    of_keys, of_values = matrix.reshape([rank, -1, sum(sizes)]).split(list(sizes), -1)
    return of_keys.transpose([1, 2, 0]), of_values.transpose([1, 0, 2])


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [B, L, H, I] times a matrix of each head, [H, I, O], to [B, L, H, O]."""
    return paddle.matmul(x.transpose([0, 2, 1, 3]), matrices).transpose([0, 2, 1, 3])
