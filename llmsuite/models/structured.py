"""Adapters whose update of a matrix W is no pair of factors that is cut with W, for one card.

Under tensor parallel every rank has all of their parameters, and computes the update of its part of W.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.autograd import PyLayer

from llmsuite.models.adapter import Adapter
from llmsuite.typing import Tensor


class Part:
    """The part of a matrix that a rank multiplies with, and of the tensors around it: all of them, on one card."""

    inputs: slice | None = None
    """Which of the I inputs, if not all."""
    outputs: slice | None = None
    """Which of the O outputs, if not all."""

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or of an input."""
        return tensor

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """The output for an input x, of this rank's part of it."""
        return y

    def output_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """This rank's part of the gradient of that output."""
        return gradient

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, of what this rank adds to it."""
        return gradient

    def parameter_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of a parameter, of what this rank adds to it."""
        return gradient


class StructuredLinear(Adapter):
    """x W + f(x), for an f that is linear in x. Nothing is kept of f for the backward pass: it is computed again."""

    part: Part

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """f of all inputs: x [..., I] and the adapter's parameters to [..., O]."""
        raise AssertionError(f"{type(self).__name__} has to define `update`")

    def own(self) -> list[Tensor]:
        """The adapter's parameters, as `update` takes them."""
        raise AssertionError(f"{type(self).__name__} has to define `own`")

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        if not self.is_on:
            return self.base(x)
        dropped = self.lora_dropout(x)
        y = _Product.apply(x, None if dropped is x else dropped, *self.own(), (self,))
        return self.complete_sum(y if self.bias is None else y + self.bias)

    def merge(self) -> None:
        raise AssertionError("merged where weights are read, see `llmsuite.convert.adapter`")

    def local_weight(self, dtype: Any) -> Tensor:
        """This rank's part of W."""
        return self.part.local(self.dense_weight(dtype))

    def local_update(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """This rank's part of f, of its part of the inputs."""
        if self.part.inputs is not None:
            before, after = self.part.inputs.start, self.weight.shape[0] - self.part.inputs.stop
            zeros = [paddle.zeros([*x.shape[:-1], size], x.dtype) for size in (before, after)]
            x = paddle.concat([zeros[0], x, zeros[1]], -1)
        y = self.update(x, *parameters)
        return y if self.part.outputs is None else y[..., self.part.outputs]


class _Product(PyLayer):
    """x W + f(dropped x). The layer comes in a tuple, which PyLayer does not look into: under sharding stage 3 its
    parameters have other memory by the time of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor | None, *rest: Any) -> Tensor:
        *own, (layer,) = rest
        seen = x if dropped is None else dropped
        ctx.layer, ctx.drops, ctx.wants_x = layer, dropped is not None, not x.stop_gradient
        ctx.save_for_backward(seen)
        local = layer.part.local
        y = layer.matmul(local(x), layer.local_weight(x.dtype))
        y = y + layer.local_update(local(seen), [local(parameter) for parameter in own])
        return layer.part.output(y, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer, part, (seen,) = ctx.layer, ctx.layer.part, ctx.saved_tensor()
        gradient = part.output_gradient(gradient, seen)
        x, *own = (_leaf(part.local(tensor)) for tensor in (seen, *layer.own()))
        with paddle.enable_grad():
            update = layer.local_update(x, own)
        paddle.autograd.backward([update], [gradient])
        found = [part.parameter_gradient(parameter.grad, seen) for parameter in own]
        dx = None
        if ctx.wants_x:
            dx = layer.matmul(gradient, layer.local_weight(gradient.dtype), transpose_y=True)
            dx = part.input_gradient(dx if ctx.drops else dx + x.grad, seen)
        if not ctx.drops:
            return (dx, *found)
        return (dx, part.input_gradient(x.grad, seen) if ctx.wants_x else None, *found)


def _leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor.stop_gradient = False
    return tensor


def mora_update(x: Tensor, square: Tensor, num_outputs: int) -> Tensor:
    """MoRA with rotation (Jiang et al. 2024, arXiv 2405.12130, section 4): x is cut into pieces as long as the square
    matrix is wide, each is rotated by its place (RoPE) and multiplied with it, and the results stand one behind the
    other. As paddlenlp has it, a last piece that is short goes on with the first inputs,
    and outputs are repeated when there are more than inputs.

    Args:
        x: [..., I].
        square: M [S, S].
        num_outputs: O.
    """
    size, num_inputs = square.shape[0], x.shape[-1]
    if num_inputs % size:
        x = paddle.concat([x, x[..., : size - num_inputs % size]], -1)
    leading, half = x.shape[:-1], size // 2
    pieces = x.reshape([*leading, -1, size])
    frequencies = 10000.0 ** (paddle.arange(0, size, 2, dtype="float32") / -size)
    angles = paddle.arange(pieces.shape[-2], dtype="float32").unsqueeze(1) * paddle.concat([frequencies, frequencies])
    turned = paddle.concat([-pieces[..., half:], pieces[..., :half]], -1)
    rotated = pieces * angles.cos().astype(x.dtype) + turned * angles.sin().astype(x.dtype)
    y = paddle.matmul(rotated, square).reshape([*leading, -1])
    repeats = -(-num_outputs // y.shape[-1])
    return (paddle.concat([y] * repeats, -1) if repeats > 1 else y)[..., :num_outputs]


def kron_update(x: Tensor, outer: Tensor, *inner: Tensor) -> Tensor:
    """x (kron(w1, w2))^T, without making that matrix: x as [I1, I2] is multiplied with w2 on one side, w1 on the other
    (LoKr, Yeh et al. 2023, LyCORIS, arXiv 2309.14859).

    Args:
        x: [..., I1 I2].
        outer: w1 [O1, I1].
        inner: w2 [O2, I2], or two matrices whose product it is.

    Returns:
        [..., O1 O2].
    """
    leading, (num_outer, outer_inputs) = x.shape[:-1], outer.shape
    y = x.reshape([*leading, outer_inputs, -1])
    for factor in reversed(inner):
        y = paddle.matmul(y, factor, transpose_y=True)
    swap = [*range(len(leading)), len(leading) + 1, len(leading)]
    y = paddle.matmul(y.transpose(swap), outer, transpose_y=True)  # one product, not one for each token
    return y.transpose(swap).reshape([*leading, num_outer * inner[0].shape[0]])
