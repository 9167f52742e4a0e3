"""The gated delta rule, a linear attention whose state is a matrix for each head, and the short convolution before it.

For each token t, with query q, key k, value v, log-decay g <= 0 and step size b (Yang et al. 2024, "Gated Delta
Networks", arXiv 2412.06464, eq. 10):

    S_t = exp(g_t) S_{t-1} + k_t (b_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,    o_t = S_t^T q_t

Shapes: B batch, L length, H heads, K key size, V value size, N chunks, C tokens of a chunk, T taps, I channels. A state
is [B, H, K, V]. A row may hold several documents: `positions` [B, L] are those of each token in its document, and
neither state nor convolution reaches over the border of a document, which is where the position is 0. Tokens of padding
on the left have position 0. With None for `positions` the tokens continue the state.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.models.shape_spec import GatedDelta

_NORM_EPS = 1e-6
"""Term under the root of the norms of queries and keys."""


def unit_norm(x: Tensor) -> Tensor:
    """Vectors [..., K] divided by their Euclidean norms."""
    return x * paddle.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor, positions: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs and last state of the gated delta rule, computed in float32.

    Args:
        q: queries [B, L, H, K], scaled.
        k: keys [B, L, H, K].
        v: values [B, L, H, V].
        decay: logarithm of the decay, [B, L, H].
        step: step size, [B, L, H].
        positions: positions in documents, [B, L]; None where the tokens continue the state.
        state: state before the first token; None for zeros.

    Returns:
        Outputs [B, L, H, V], and the state after the last token.
    """
    q, k, v, decay, step = (x.astype("float32") for x in (q, k, v, decay, step))
    starts = None if positions is None else (positions == 0).astype("float32")
    if q.shape[1] == 1 and state is not None:
        return recurrent_delta_rule(q, k, v, decay, step, starts, state)
    return _in_chunks(q, k, v, decay, step, starts, state)


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor, starts: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` token by token, by its definition; `starts` [B, L] is 1 where a document begins, else 0."""
    outputs = []
    for t in range(q.shape[1]):
        kept = paddle.exp(decay[:, t])
        if starts is not None:
            kept = kept * (1.0 - starts[:, t : t + 1])
        state = state * kept.unsqueeze([2, 3])
        key = k[:, t].unsqueeze(2)
        error = (v[:, t].unsqueeze(2) - paddle.matmul(key, state)) * step[:, t].unsqueeze([2, 3])
        state = state + paddle.matmul(key, error, transpose_x=True)
        outputs.append(paddle.matmul(q[:, t].unsqueeze(2), state).squeeze(2))
    return paddle.stack(outputs, 1), state


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor, starts: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` by chunks (section 3.3 of the paper): what the tokens of a chunk write to the state is the
    solution of a triangular system, so that products of matrices replace the recurrence inside of it."""
    batch, length, heads, key_size = q.shape
    size = min(GatedDelta.chunk, length)
    q, k, v = (_chunked(x, size) for x in (q, k, v))
    step = _chunked(step.unsqueeze(-1), size)
    decay = _chunked(decay.unsqueeze(-1), size)
    lower = paddle.tril(paddle.ones([size, size], "float32"))
    earlier = paddle.tril(lower, -1)
    # from each token (row) to each earlier one: sums from there on, as differences of sums from the beginning of the
    # chunk would round by what is in other documents
    between = paddle.exp(paddle.cumsum(decay * earlier, 3)) * lower
    from_state = paddle.exp(paddle.cumsum(decay, 3))
    if starts is not None:
        document = paddle.cumsum(_chunked(starts.unsqueeze([2, 3]), size), 3)  # [B, 1, N, C, 1], counted in the chunk
        between = between * (document == document.transpose([0, 1, 2, 4, 3])).astype("float32")
        from_state = from_state * (document == 0).astype("float32")
    to_state = between[:, :, :, -1:].transpose([0, 1, 2, 4, 3])
    over_chunk = from_state[:, :, :, -1:]
    stepped = k * step
    system = paddle.matmul(stepped, k, transpose_y=True) * between * earlier
    sides = paddle.concat([v * step, stepped * from_state], -1)
    solved = paddle.linalg.triangular_solve(system + paddle.eye(size), sides, upper=False, unitriangular=True)
    values, reads = paddle.split(solved, [v.shape[-1], key_size], -1)
    scores = paddle.matmul(q, k, transpose_y=True) * between
    q = q * from_state
    k = k * to_state
    if state is None:
        state = paddle.zeros([batch, heads, key_size, v.shape[-1]], "float32")
    outputs = []
    for n in range(q.shape[2]):
        written = values[:, :, n] - paddle.matmul(reads[:, :, n], state)
        outputs.append(paddle.matmul(q[:, :, n], state) + paddle.matmul(scores[:, :, n], written))
        state = state * over_chunk[:, :, n] + paddle.matmul(k[:, :, n], written, transpose_x=True)
    out = paddle.stack(outputs, 2).reshape([batch, heads, -1, v.shape[-1]])
    return out[:, :, :length].transpose([0, 2, 1, 3]), state


def _chunked(x: Tensor, size: int) -> Tensor:
    """x [B, L, H, I] in chunks, [B, H, N, C, I]; the last one is filled with zeros, which change no state."""
    missing = -x.shape[1] % size
    if missing:
        x = paddle.concat([x, paddle.zeros([x.shape[0], missing, *x.shape[2:]], x.dtype)], 1)
    return x.reshape([x.shape[0], -1, size, *x.shape[2:]]).transpose([0, 3, 1, 2, 4])


def causal_convolution(
    x: Tensor, kernel: Tensor, positions: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel with a kernel of its own, and SiLU.

    Args:
        x: inputs [B, L, I].
        kernel: weights [T, 1, I], that of the token itself last.
        positions: positions in documents, [B, L]; None where the tokens continue `before`.
        before: the T - 1 inputs before the first token, [B, T - 1, I]; None for zeros.

    Returns:
        Outputs [B, L, I], and the last T - 1 inputs.
    """
    length = x.shape[1]
    taps = kernel.shape[0]
    if before is None:
        before = paddle.zeros([x.shape[0], taps - 1, x.shape[2]], x.dtype)
    inputs = paddle.concat([before, x], 1)
    out = x * kernel[taps - 1]
    for distance in range(1, taps):
        first = taps - 1 - distance
        earlier = inputs[:, first : first + length] * kernel[first]
        if positions is not None:
            earlier = earlier * (positions >= distance).astype(x.dtype).unsqueeze(-1)
        out = out + earlier
    return F.silu(out), inputs[:, length:]
