"""Sums over ranks inside of a whole-step program, of which each rank makes a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.typing import Tensor


def summed(part: Tensor, mesh: Any, of_parts: Sequence[Any], of_one: Sequence[Any], wanted: Sequence[Any]) -> Tensor:
    """The sum of the parts of several ranks, in the placements that are wanted.

    Args:
        part: this rank's, a plain tensor.
        mesh: [data, tp].
        of_parts: placements of the parts of the sum.
        of_one: those that the tensor would have if one part were all of the sum.
        wanted: those of the result.
    """
    # The gradient of parts of a sum would be made parts of a sum too (Paddle 3.3.1), and each part needs all of it.
    # So the sum has none, and what is added to it is zero and has the gradient.
    total = dist.reshard(dtensor_from_local(_constant(part), mesh, of_parts), mesh, wanted)
    own = dtensor_from_local(part, mesh, of_one)
    own = own if own.placements == wanted else dist.reshard(own, mesh, wanted)
    return total + (own - _constant(own))


def _constant(x: Tensor) -> Tensor:
    """The same without a gradient. For what `detach` makes in a program Paddle 3.3.1 has no bfloat16 on CPUs."""
    if x.dtype != paddle.bfloat16:
        return x.detach()
    copy = paddle.assign(x)
    copy.stop_gradient = True
    return copy
