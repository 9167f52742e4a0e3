"""Operations of a backward pass that several parts of tensor parallelism share."""

from __future__ import annotations

from typing import Any

from paddle.autograd import PyLayer

from llmsuite.parallel import collective
from llmsuite.typing import Tensor


class SumGradients(PyLayer):
    """Identity whose gradients are summed over a group, each rank of which does a part of the work with the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        collective.sum_in_group(total, ctx.group)
        return total
