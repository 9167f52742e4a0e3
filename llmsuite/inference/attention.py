"""Attention of a few new queries over a long cache of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices.masks import causal_mask
from llmsuite.devices.ops import Ops, rotary
from llmsuite.models.blocks import dim_size


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of new tokens over a cache. Unlike `llmsuite.devices.ops.attention` it does not repeat
    keys and values for each query head, and does not copy the cache. Runs in a static program with dynamic batch and
    lengths.

    q [B, L, H, K]; k, v [B, J, S, K]; mask [B, 1, L, S], or of every head, [B, J, H / J, L, S] -> [B, L, H, K].
    """
    num_groups = k.shape[1]
    width = k.shape[3]
    length = dim_size(q, 1)
    keys = dim_size(k, 2)
    q = (q * width**-0.5).transpose([0, 2, 1, 3])
    # the queries of a group are laid end to end: one matmul for each group
    scores = paddle.matmul(q.reshape([0, num_groups, -1, width]), k, transpose_y=True)
    if mask.ndim == 4:  # it is the same for all heads
        mask = mask.unsqueeze(1)
    weights = F.softmax(scores.reshape([0, num_groups, -1, length, keys]) + mask, -1)
    out = paddle.matmul(weights.reshape([0, num_groups, -1, keys]), v)
    return out.reshape([0, -1, length, v.shape[3]]).transpose([0, 2, 1, 3])


def rounded_grouped_attention(
    round_activation: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """`grouped_attention` with rounded inputs of its matmuls, exactly as in training. Not for programs.

    Queries, keys, values and weights are rounded by `round_activation` (`MatmulOps.round_attention_input`); weights
    before they are divided by their sum.
    """
    num_groups = k.shape[1]
    width = k.shape[3]
    length = q.shape[1]
    keys = k.shape[2]
    q, k, v = (round_activation(x) for x in (q, k, v))
    q = (q * width**-0.5).transpose([0, 2, 1, 3])
    scores = paddle.matmul(q.reshape([0, num_groups, -1, width]), k, transpose_y=True)
    if mask.ndim == 4:  # it is the same for all heads
        mask = mask.unsqueeze(1)
    scores = scores.reshape([0, num_groups, -1, length, keys]) + mask
    # the division comes last, because training rounds the weights before they are normalised
    weights = paddle.exp(scores - scores.max(-1, keepdim=True)).reshape([0, num_groups, -1, keys])
    out = paddle.matmul(round_activation(weights), v) / weights.sum(-1, keepdim=True)
    return out.reshape([0, -1, length, v.shape[3]]).transpose([0, 2, 1, 3])


def with_cached_attention(ops: Ops, attention: Callable[..., Tensor] = grouped_attention) -> Ops:
    """The operations of a model that generates, with an attention whose keys and values are [B, J, S, K].

    Kernels of training around attention are replaced by plain forms: they support neither padding on the left nor
    separate positions of each row.
    """
    decoding = dataclasses.replace(ops.decoding, heads_first=True)
    return dataclasses.replace(ops, causal_mask=causal_mask, rotary=rotary, attention=attention, decoding=decoding)
