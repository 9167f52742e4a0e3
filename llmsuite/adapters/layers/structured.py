"""Adapters whose update of a matrix W is not a pair of factors that can be sharded with W, for one card.

Under tensor parallelism every rank has all their parameters, and computes the update of its shard of W.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.autograd import PyLayer

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.base.typing import Tensor
from llmsuite.models.linear import add_bias


class WeightShard:
    """The shard of a matrix, and of the tensors around it, that a rank computes with: on one card the full ones."""

    inputs: slice | None = None
    """The rank's slice of the I inputs; None for all."""
    outputs: slice | None = None
    """The rank's slice of the O outputs; None for all."""

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's shard of a parameter or of an input."""
        return tensor

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """The output for an input x, from this rank's shard of it."""
        return y

    def output_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """This rank's shard of the gradient of that output."""
        return gradient

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, from this rank's contribution."""
        return gradient

    def parameter_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of a parameter, from this rank's contribution."""
        return gradient


class StructuredLinear(Adapter):
    """x W + f(x) for an f that is linear in x. The backward pass recomputes f instead of saving its intermediates."""

    part: WeightShard

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """f(x) for all inputs x [..., I] and the adapter's parameters, [..., O]."""
        raise AssertionError(f"{type(self).__name__} has to define `update`")

    def adapter_parameters(self) -> list[Tensor]:
        """The adapter's parameters, in the order in which `update` takes them."""
        raise AssertionError(f"{type(self).__name__} has to define `adapter_parameters`")

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        if not self.is_enabled:
            return self.base(x)
        dropped = self.lora_dropout(x)
        y = _Product.apply(x, None if dropped is x else dropped, *self.adapter_parameters(), (self,))
        return self.reduce_partial_sum(add_bias(y, self.bias))

    def merge(self) -> None:
        raise AssertionError("merged where weights are read, see `llmsuite.checkpoint.convert.adapter`")

    def local_weight(self, dtype: Any) -> Tensor:
        """This rank's shard of W."""
        return self.part.local(self.dense_weight(dtype))

    def local_update(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """This rank's shard of f(x), from its shard of the inputs x, padded with zeros to all I."""
        if self.part.inputs is not None:
            before = self.part.inputs.start
            after = self.weight.shape[0] - self.part.inputs.stop
            zeros = [paddle.zeros([*x.shape[:-1], size], x.dtype) for size in (before, after)]
            x = paddle.concat([zeros[0], x, zeros[1]], -1)
        y = self.update(x, *parameters)
        return y if self.part.outputs is None else y[..., self.part.outputs]


class _Product(PyLayer):
    """x W + f(dropout(x)). The layer comes in a tuple, which PyLayer does not inspect: under sharding stage 3 its
    parameters have other memory by the time of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor | None, *rest: Any) -> Tensor:
        *own, (layer,) = rest
        adapter_input = x if dropped is None else dropped
        ctx.layer = layer
        ctx.has_dropout = dropped is not None
        ctx.needs_x_grad = not x.stop_gradient
        ctx.save_for_backward(adapter_input)
        local = layer.part.local
        y = layer.matmul(local(x), layer.local_weight(x.dtype))
        y = y + layer.local_update(local(adapter_input), [local(parameter) for parameter in own])
        return layer.part.output(y, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer = ctx.layer
        part = ctx.layer.part
        (adapter_input,) = ctx.saved_tensor()
        gradient = part.output_gradient(gradient, adapter_input)
        x, *own = (_leaf(part.local(tensor)) for tensor in (adapter_input, *layer.adapter_parameters()))
        with paddle.enable_grad():
            update = layer.local_update(x, own)
        paddle.autograd.backward([update], [gradient])
        own_grads = [part.parameter_gradient(parameter.grad, adapter_input) for parameter in own]
        x_grad = None
        if ctx.needs_x_grad:
            x_grad = layer.matmul(gradient, layer.local_weight(gradient.dtype), transpose_y=True)
            x_grad = part.input_gradient(x_grad if ctx.has_dropout else x_grad + x.grad, adapter_input)
        if not ctx.has_dropout:
            return (x_grad, *own_grads)
        dropped_grad = part.input_gradient(x.grad, adapter_input) if ctx.needs_x_grad else None
        return (x_grad, dropped_grad, *own_grads)


def _leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor.stop_gradient = False
    return tensor
