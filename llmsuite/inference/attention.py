"""Attention of a few new queries over a long cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import paddle.nn.functional as F

from llmsuite.models.blocks import dim_size
from llmsuite.typing import Tensor


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As `llmsuite.devices.ops.attention`, but keys and values are not repeated for each query head, and the cache
    is not copied. Runs in a static program with dynamic batch and lengths.

    q [B, L, H, K]; k, v [B, J, S, K]; mask [B, 1, L, S], or of every head, [B, J, H / J, L, S] -> [B, L, H, K].
    """
    num_groups, width, length, keys = k.shape[1], k.shape[3], dim_size(q, 1), dim_size(k, 2)
    q = (q * width**-0.5).transpose([0, 2, 1, 3])
    # the queries of a group are laid end to end: one product a group
    scores = paddle.matmul(q.reshape([0, num_groups, -1, width]), k, transpose_y=True)
    mask = mask if mask.ndim == 5 else mask.unsqueeze(1)
    weights = F.softmax(scores.reshape([0, num_groups, -1, length, keys]) + mask, -1)
    out = paddle.matmul(weights.reshape([0, num_groups, -1, keys]), v)
    return out.reshape([0, -1, length, v.shape[3]]).transpose([0, 2, 1, 3])


def rounded_grouped_attention(
    operand: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """`grouped_attention` of what `Ops.attention_operand` makes of queries, keys, values and of weights, which are
    rounded before they are divided by their sum, as in training. Not for programs."""
    num_groups, width, length, keys = k.shape[1], k.shape[3], q.shape[1], k.shape[2]
    q, k, v = (operand(x) for x in (q, k, v))
    q = (q * width**-0.5).transpose([0, 2, 1, 3])
    scores = paddle.matmul(q.reshape([0, num_groups, -1, width]), k, transpose_y=True)
    mask = mask if mask.ndim == 5 else mask.unsqueeze(1)
    scores = scores.reshape([0, num_groups, -1, length, keys]) + mask
    weights = paddle.exp(scores - scores.max(-1, keepdim=True)).reshape([0, num_groups, -1, keys])
    out = paddle.matmul(operand(weights), v) / weights.sum(-1, keepdim=True)
    return out.reshape([0, -1, length, v.shape[3]]).transpose([0, 2, 1, 3])
