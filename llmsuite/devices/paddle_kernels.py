"""Paddle's fused kernels for GPUs and XPUs, in the forms that `llmsuite.devices.ops.Ops` takes.

Shapes: B batch, L query length, S key length, H query heads, J key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices.local_parts import have_same_layout, is_split, local_constant, on_local_rows, on_local_shards
from llmsuite.devices.masks import document_spans
from llmsuite.devices.ops import rms_norm
from llmsuite.devices.optimizer_ops import square_sum, taken

_last_joined: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
"""Arguments and results of the last call of `_for_both_halves`."""


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal flash attention. q [B, L, H, K]; k, v [B, S, J, K] -> [B, L, H, K]. A single query sees every key, so the
    causal flag is off.

    A mask has the form of `document_ends`; tiles between documents are skipped (FlashMask, arXiv 2410.01359). Each rank
    computes its own heads (`llmsuite.devices.local_parts`); in a static program Paddle's SPMD rule shards them.
    """
    if is_split(q) and have_same_layout([q, k, v]):
        mask = (
            None if mask is None else local_constant(mask)
        )  # `recompute` of Paddle 3.3.1 makes it a distributed tensor
        return on_local_shards(lambda q, k, v: flash_attention(q, k, v, mask), q, k, v)
    if mask is not None:
        assert mask.dtype == paddle.int32, "flash attention takes causality as a flag, not as a mask"
        if mask.shape[0] != q.shape[0]:  # the mask of a window alone has one row for all
            mask = mask.expand([q.shape[0], *mask.shape[1:]])
        return F.flashmask_attention(q, k, v, mask, causal=True)
    output, _ = F.flash_attention.flash_attention(q, k, v, causal=q.shape[1] > 1)
    return output


def document_ends(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`document_mask` in the form of flash attention, [B, 1, L, 1] int32: for each key the first query that does not
    see it, where the key's document ends or the key leaves the window.

    All parts of a document that continue its first tokens (`document_spans`) have to continue the same number of them,
    as after a prefix. With a window there must be no such parts: some queries between those that see a key would not
    see it, which this form cannot express.
    """
    length = document_starts.shape[1]
    at = paddle.arange(length, dtype=document_starts.dtype).expand_as(document_starts)
    _, end, own = document_spans(document_starts).unbind(1)
    # marked padding continues no document
    is_new = paddle.logical_or(document_starts == at, paddle.logical_and(document_starts <= 0, own == at))
    part_ends = _next_begins(own == at, at)
    document_ends = _next_begins(is_new, at)
    last_part = paddle.take_along_axis(end, document_ends - 1, 1)  # the number of tokens that each part continues
    ends = paddle.where(at < last_part, document_ends, part_ends)
    if window is not None:
        ends = paddle.minimum(ends, at + window)
    return ends.astype("int32").unsqueeze([1, 3])


def _next_begins(is_begin: Tensor, at: Tensor) -> Tensor:
    """For each index of a row the next later index where `is_begin`; the length where there is none."""
    length = paddle.full_like(at[:, :1], at.shape[1])
    begins = paddle.where(is_begin, at, length.expand_as(at))
    following = paddle.concat([begins[:, 1:], length], 1)
    return paddle.cummin(following.flip(1), 1)[0].flip(1)


def no_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor | None:
    """Mask of causal attention kernels, which need as many queries as keys, or one query: None, or with a window the
    form of `document_ends`, [1, 1, L, 1]. A single query is not supported with a window: flash attention would let it
    see all keys."""
    assert num_queries in (1, num_keys), "chunked prefill is not supported with flash attention"
    if window is None:
        return None
    assert num_queries == num_keys, "a single query has no window with flash attention"
    return (paddle.arange(num_keys, dtype="int32") + window).clip(max=num_keys).reshape([1, 1, -1, 1])


def fused_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary` in one kernel, which needs cos and sin for both halves."""
    cos, sin = _for_both_halves(cos, sin)
    shape = x.shape
    if cos.shape[0] > 1:  # the kernel has one rotation for all rows: join them to one row
        x, cos, sin = (t.reshape([1, -1, *t.shape[2:]]) for t in (x, cos, sin))
    rotated, _, _ = paddle.incubate.nn.functional.fused_rotary_position_embedding(
        x, None, None, sin=sin, cos=cos, use_neox_rotary_style=False
    )
    return rotated.reshape(shape)


def _for_both_halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin of half a head, twice in a row: those of a head. All layers of a pass give the same two tensors, and
    get the same two."""
    global _last_joined
    if not paddle.in_dynamic_mode():  # tensors of a program, which no other one may have
        return paddle.concat([cos, cos], -1), paddle.concat([sin, sin], -1)
    if _last_joined is None or _last_joined[0] is not cos or _last_joined[1] is not sin:
        _last_joined = (cos, sin, paddle.concat([cos, cos], -1), paddle.concat([sin, sin], -1))
    return _last_joined[2:]


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one kernel, on local shards, as Paddle 3.3.1 has no SPMD rule for it."""
    if not x.is_dist():
        return F.rms_norm(x, [x.shape[-1]], weight, eps)[0]
    if not is_split(x):
        return rms_norm(x, weight, eps)
    return on_local_rows(lambda rows, gain: F.rms_norm(rows, [rows.shape[-1]], gain, eps)[0], x, weight)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in one kernel."""
    return F.swiglu(gate, up)


def one_read_square_sum(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """`optimizer_ops.square_sum` in one read of each float32 tensor. The factor comes after the sums, so squares
    overflow where the norm before it is above 1e19; the norm is infinite then."""
    wide = [x for x in tensors if x.dtype == paddle.float32]
    sums = [paddle._C_ops.squared_l2_norm(x).reshape([]) * factor**2 for x in wide]
    if len(wide) < len(tensors):  # the kernel for 16 bits rounds its sum
        sums.append(square_sum([x for x in tensors if x.dtype != paddle.float32], factor))
    return paddle.add_n(sums)


_MOST_MERGED = (1 << 31) - 1
"""Elements of a parameter that the kernel for several can count."""
_MERGED_CHUNK = 1 << 16
"""Elements that a block of threads updates, Paddle's own default."""


def merged_adamw(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], factor: float, rates: Sequence[float],
    slots: Sequence[Sequence[Tensor]], betas: tuple[float, float], epsilon: float, decays: Sequence[float],
) -> None:  # fmt: skip
    """`OptimizerOps.adamw` in one call for all parameters with the same learning rate and weight decay. The kernel
    takes the powers of the first one for all."""
    groups: dict[tuple[float, float, int], list[int]] = {}
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        gradient.scale_(factor)
        alone = number if parameter.size > _MOST_MERGED else -1
        groups.setdefault((rates[number], decays[number], alone), []).append(number)
    for (rate, decay, _), members in groups.items():
        own = taken(parameters, members)
        given = taken(gradients, members)
        state = [taken(slot, members) for slot in slots]
        step = paddle.full([1], rate, "float32")
        if len(members) > 1:
            _update_together(own, given, step, state, betas, epsilon, decay)
        else:
            _update_one(own[0], given[0], step, [slot[0] for slot in state], betas, epsilon, decay)


def _update_together(
    parameters: list[Tensor], gradients: list[Tensor], rate: Tensor, slots: Sequence[list[Tensor]],
    betas: tuple[float, float], epsilon: float, decay: float,
) -> None:  # fmt: skip
    moments1, moments2, powers1, powers2 = slots
    paddle._C_ops.fused_adam_(
        parameters, gradients, rate, moments1, moments2, None, powers1, powers2, None, None, *betas, epsilon,
        _MERGED_CHUNK, decay, True, False, False, False,
    )  # fmt: skip


def _update_one(
    parameter: Tensor, gradient: Tensor, rate: Tensor, slots: Sequence[Tensor],
    betas: tuple[float, float], epsilon: float, decay: float,
) -> None:  # fmt: skip
    moment1, moment2, power1, power2 = slots
    paddle._C_ops.adamw_(
        parameter, gradient, rate, moment1, moment2, None, power1, power2, None, None, *betas, epsilon, 1.0, decay,
        True, False, 1000, False, False, False,
    )  # fmt: skip
