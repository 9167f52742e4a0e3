"""Layers of experts for MoRA and LoKr, whose updates of a matrix are no pairs of factors, and such an update as a
matrix.

Shapes: E experts, I inputs and O outputs of each one's matrix, N rows, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle
from paddle.autograd import PyLayer

from llmsuite.adapters.layers.experts import ExpertsAdapter
from llmsuite.base.typing import Tensor
from llmsuite.models.experts import Counts, Local


class StructuredExperts(ExpertsAdapter):
    """x W + f(x) for each expert, for an f that is linear in x and is recomputed in the backward pass, as in a
    `StructuredLinear`. A rank has full experts, never a shard of one, so each f has all inputs and outputs of its
    W."""

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """f of one expert, [N, O], for its rows [N, I] and its parameters."""
        raise AssertionError(f"{type(self).__name__} has to define `update`")

    def adapter_parameters(self) -> list[Tensor]:
        """The adapter's parameters, a stack each, in the order in which `update` takes them."""
        raise AssertionError(f"{type(self).__name__} has to define `adapter_parameters`")

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        return y + _Update.apply(x, *(local(stack) for stack in self.adapter_parameters()), (self, local, list(counts)))


class _Update(PyLayer):
    """f of the rows of each expert. The layer comes in a tuple, as in a `StructuredLinear`: its parameters may
    have other memory by the time of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *stacks, (layer, local, counts) = rest
        ctx.layer = layer
        ctx.local = local
        ctx.counts = counts
        ctx.needs_x_grad = not x.stop_gradient
        ctx.save_for_backward(x)
        groups = zip(x.split(counts), *(stack.unbind(0) for stack in stacks), strict=True)
        outputs = [layer.update(rows, *parameters) for rows, *parameters in groups if rows.shape[0]]
        return paddle.concat(outputs) if outputs else paddle.zeros([0, layer.weight.shape[-1]], x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensor()
        stacks = [ctx.local(stack) for stack in ctx.layer.adapter_parameters()]
        x_grads = []
        parameter_grads = []
        for number, (rows, output_grad) in enumerate(zip(x.split(ctx.counts), gradient.split(ctx.counts))):
            own = [stack[number].detach() for stack in stacks]
            if not ctx.counts[number]:  # without rows the gradients of the parameters are zeros
                parameter_grads.append([paddle.zeros_like(parameter) for parameter in own])
                continue
            leaves = [rows.detach(), *own]
            for leaf in leaves:
                leaf.stop_gradient = False
            with paddle.enable_grad():
                y = ctx.layer.update(*leaves)
            paddle.autograd.backward([y], [output_grad])
            x_grads.append(leaves[0].grad)
            parameter_grads.append([leaf.grad for leaf in leaves[1:]])
        x_grad = None
        if ctx.needs_x_grad:
            x_grad = paddle.concat(x_grads) if x_grads else paddle.zeros_like(x)
        return (x_grad, *(paddle.stack(list(gradients)) for gradients in zip(*parameter_grads)))


UpdateOf = Callable[[Tensor, Mapping[str, Tensor], int, float], Tensor]


def update_matrix(update_of: UpdateOf, parameters: Mapping[str, Tensor], shape: Sequence[int], scale: float) -> Tensor:
    """The update of a matrix [I, O], or of each matrix of a stack [E, I, O], that a merge adds, in float32.

    Args:
        update_of: `StructuredMethod.update_of` of the method.
        parameters: by kind, in the order in which the layer has them.
        shape: of the matrix or the stack.
        scale: factor of the output of the adapter.
    """
    if len(shape) > 2:
        one_by_one = zip(*(stack.unbind(0) for stack in parameters.values()), strict=True)
        of_each = [dict(zip(parameters, values)) for values in one_by_one]
        return paddle.stack([update_matrix(update_of, own, shape[1:], scale) for own in of_each])
    # the update of the unit vectors is the matrix of the update
    return update_of(paddle.eye(shape[0]), parameters, shape[1], scale)
