"""The operations that a model computes with, and their plain forms, which run anywhere and are the reference.

A device may have fused kernels for them (`llmsuite.devices.base.DeviceBackend.kernels`). Models use devices through
`Ops` only: they compute with the operations that they are given, and know no device.

Shapes: B batch, L query length, S key length, H query heads, J key-value heads, K head size, F intermediate, N tokens,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices.decoding_ops import DecodingOps
from llmsuite.devices.expert_ops import ExpertOps
from llmsuite.devices.masks import causal_mask, document_mask
from llmsuite.devices.matmul_ops import MatmulOps


def identity(x: Tensor) -> Tensor:
    """x: where a layer has nothing to reduce, to drop or to cut."""
    return x


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax(q k^T / sqrt(K) + mask) v. q [B, L, H, K]; k, v [B, S, J, K] -> [B, L, H, K]. `group`, `cap` and `sinks`
    as in `scored_attention`."""
    groups = q.shape[2] // k.shape[2] if group is None else group
    if groups > 1:
        k, v = (paddle.stack([x] * groups, 3).reshape([0, 0, -1, x.shape[-1]]) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
    # queries are scaled, not scores: those are larger, and may overflow in fp16
    scores = paddle.matmul(q * scale, k, transpose_y=True)
    if cap is not None:
        scores = cap * paddle.tanh(scores / cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        # one more key, whose value is zero
        column = paddle.zeros_like(scores[..., :1]) + sinks.astype(scores.dtype).reshape([1, -1, 1, 1])
        scores = paddle.concat([scores, column], -1)
        v = paddle.concat([v, paddle.zeros_like(v[:, :, :1])], 2)
    return paddle.matmul(F.softmax(scores, -1), v).transpose([0, 2, 1, 3])


def scored_attention(
    group: int,
    cap: float | None,
    heads_first: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attention` with changes that need all scores.

    Args:
        group: number of heads of queries that share a head of keys: a program does not know the first of them.
        cap: C where scores s become C tanh(s / C) before the mask is added (Gemma 2); None for plain scores.
        heads_first: True where k and v are [B, J, S, K], as those of a cache.
        q: as for `attention`.
        k: keys.
        v: values.
        mask: as for `attention`.
        sinks: [H], a score of each head that has no value: exp(sink) is added to the denominator of the softmax
            (gpt-oss, arXiv 2508.10925, section 2). None for none.
    """
    if heads_first:
        k, v = (x.transpose([0, 2, 1, 3]) for x in (k, v))
    return attention(q, k, v, mask, group, cap, sinks)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, normalised in float32 (RMSNorm, Zhang and Sennrich 2019, arXiv
    1910.07467)."""
    wide = x.astype("float32")
    scaled = wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.astype(x.dtype) * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head (RoPE, Su et al. 2021, arXiv 2104.09864). x [B, L, H, K]; cos, sin
    [1, L, 1, K / 2], or [B, L, 1, K / 2] where rows differ."""
    first, second = paddle.split(x, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202). Both [B, L, F]."""
    return F.silu(gate) * up


def clamped_swiglu(slope: float, limit: float, gate: Tensor, up: Tensor) -> Tensor:
    """g sigmoid(slope g) (u + 1) with g = min(gate, limit) and u = up, cut to the range from -limit to limit (gpt-oss,
    arXiv 2508.10925, section 2). Both [..., F]."""
    gate = gate.clip(max=limit)
    up = up.clip(min=-limit, max=limit)
    return gate * F.sigmoid(slope * gate) * (up + 1.0)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-probability of each target. logits [N, V] float32, targets [N] -> [N]."""
    return F.cross_entropy(logits, targets, reduction="none").flatten()


def nll_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-probability of each target, and the entropy of its distribution in nats. logits [N, V] float32,
    targets [N] -> [N] each."""
    # the largest logit is subtracted, so that no exponential overflows
    shifted = logits - logits.detach().max(-1, keepdim=True)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    nll = total.log() - paddle.take_along_axis(shifted, targets.unsqueeze(-1), 1).squeeze(-1)
    return nll, entropy_of_sums(total, (exponentials * shifted).sum(-1))


def is_greedy_match(logits: Tensor, targets: Tensor) -> Tensor:
    """1 where the target is the choice of greedy decoding: the largest logit, the first one of equal ones; else 0.
    logits [N, V], targets [N] -> [N] in float32."""
    return (logits.argmax(-1) == targets).astype("float32")


def entropy_of_sums(total: Tensor, weighted: Tensor) -> Tensor:
    """Entropy [N] in nats from two sums over the vocabulary, which ranks with a shard of it can all-reduce: with x the
    logits minus a number m that is the same on all ranks, `total` [N] is the sum of exp(x), and `weighted` [N] that of
    x exp(x)."""
    return total.log() - weighted / total


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations that a model computes with; a device backend replaces those that it has kernels for."""

    causal_mask: Callable[..., Tensor | None] = causal_mask
    """The causal mask, computed once per forward pass for all layers; None where `attention` needs none."""
    document_mask: Callable[..., Tensor] = document_mask
    """The mask of rows of several documents, in the form that `attention` takes; with a window as `causal_mask`."""
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = attention
    """It takes the masks that `causal_mask` and `document_mask` of the same device make: the three are replaced
    together. None means causal to a kernel whose `causal_mask` returns None, and no mask to the plain form."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = rotary
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    """It may overwrite the logits, which nothing else needs."""
    matmuls: MatmulOps = dataclasses.field(default_factory=MatmulOps)
    experts: ExpertOps = dataclasses.field(default_factory=ExpertOps)
    decoding: DecodingOps = dataclasses.field(default_factory=DecodingOps)
