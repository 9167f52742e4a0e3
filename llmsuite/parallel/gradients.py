"""Operations with their own backward passes that several modules of tensor parallelism share."""

from __future__ import annotations

from typing import Any

from paddle.autograd import PyLayer

from llmsuite.base.typing import Tensor
from llmsuite.parallel import collective


class SumGradients(PyLayer):
    """Identity in the forward pass, all-reduce of the gradient in the backward pass (f of Megatron-LM): each rank of
    the group does a part of the work with the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()  # the sum is in place, and the gradient belongs to autograd
        collective.sum_in_group(total, ctx.group)
        return total
