"""The operations a device may have a fused kernel for, and their plain forms, which run anywhere.

Shapes: B batch, L query length, S key length, H query heads, J key-value heads, K head size, D hidden,
F intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F

Tensor = Any


def causal_mask(num_queries: int, num_keys: int, dtype: Any) -> Tensor:
    """[1, 1, L, S] to be added to scores: 0 where query i may see key j (j <= i + S - L), else -1e9 (-1e4 in fp16)."""
    visible = paddle.tril(paddle.ones([num_queries, num_keys], dtype="float32"), num_keys - num_queries)
    lowest = 1e4 if dtype == paddle.float16 else 1e9
    return ((visible - 1.0) * lowest).astype(dtype).unsqueeze([0, 1])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax(q k^T / sqrt(K) + mask) v. q [B, L, H, K]; k, v [B, S, J, K] -> [B, L, H, K]."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (paddle.stack([x] * groups, 3).reshape([0, 0, -1, x.shape[-1]]) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
    scores = paddle.matmul(q * scale, k, transpose_y=True)
    if mask is not None:
        scores = scores + mask
    return paddle.matmul(F.softmax(scores, -1), v).transpose([0, 2, 1, 3])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, the mean in float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    wide = x.astype("float32")
    scaled = wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.astype(x.dtype) * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head. x [B, L, H, K]; cos, sin [1, L, 1, K / 2] (Su et al. 2021, arXiv 2104.09864)."""
    first, second = paddle.split(x, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202). Both [B, L, F]."""
    return F.silu(gate) * up


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-probability of each target. logits [N, V] float32, targets [N] -> [N]."""
    return F.cross_entropy(logits, targets, reduction="none").flatten()


@dataclasses.dataclass(frozen=True)
class Ops:
    """The forms a model uses; a device backend replaces the ones it has a kernel for."""

    causal_mask: Callable[[int, int, Any], Tensor | None] = causal_mask
    """Built once a forward pass and handed to every layer; None when `attention` is causal by itself."""
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = attention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = rotary
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Flash attention, causal by itself. A single query sees every key, so it needs no causality."""
    assert mask is None, "flash attention is given its causality as a flag"
    output, _ = F.flash_attention.flash_attention(q, k, v, causal=q.shape[1] > 1)
    return output


def no_mask(num_queries: int, num_keys: int, dtype: Any) -> None:
    """For attention kernels that are causal by themselves, which need as many queries as keys, or one query."""
    assert num_queries in (1, num_keys), "chunked prefill is not supported with flash attention"


def fused_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary` in one kernel, which wants cos and sin for both halves."""
    cos, sin = (paddle.concat([t, t], axis=-1).astype(x.dtype) for t in (cos, sin))
    rotated, _, _ = paddle.incubate.nn.functional.fused_rotary_position_embedding(
        x, None, None, sin=sin, cos=cos, use_neox_rotary_style=False
    )
    return rotated


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one kernel."""
    return F.rms_norm(x, [x.shape[-1]], weight, eps)[0]


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in one kernel."""
    return F.swiglu(gate, up)
