"""Sums over ranks inside of a step program, where each rank computes a partial sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.base.typing import Tensor


def sum_partials(
    part: Tensor, mesh: Any, partial: Sequence[Any], complete: Sequence[Any], result: Sequence[Any]
) -> Tensor:
    """All-reduce the partial sums of several ranks.

    Args:
        part: partial sum of this rank, a plain tensor.
        mesh: [data, tp].
        partial: placements of the partial sums.
        complete: placements of the tensor if the part of one rank were the total.
        result: placements of the result.
    """
    # Paddle 3.3.1 would make the gradient of partial sums partial too, but each part needs all of it. So the sum has no
    # gradient, and a term is added that is zero and has the gradient.
    total = dist.reshard(dtensor_from_local(_constant(part), mesh, partial), mesh, result)
    own = dtensor_from_local(part, mesh, complete)
    own = own if own.placements == result else dist.reshard(own, mesh, result)
    return total + (own - _constant(own))


def _constant(x: Tensor) -> Tensor:
    """The tensor without a gradient. In a program on CPUs Paddle 3.3.1 has no bfloat16 kernel for `detach`."""
    if x.dtype != paddle.bfloat16:
        return x.detach()
    copy = paddle.assign(x)
    copy.stop_gradient = True
    return copy
