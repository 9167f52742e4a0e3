"""Frozen matrices that are stored quantised and made whole only where they are multiplied with, for one card.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local
from paddle.utils.dlpack import from_dlpack

from llmsuite.devices.ops import matmul
from llmsuite.models.block_quant import ABSMAX, CODES, BlockFormat, byte_levels
from llmsuite.typing import Tensor


class QuantisedMatrix(nn.Layer):
    """A frozen matrix [I, O], or a stack of them, as codes and scales of blocks, in place of the parameter."""

    codes: Tensor
    absmax: Tensor
    matmul = staticmethod(matmul)

    def __init__(self, shape: Sequence[int], format: BlockFormat):
        super().__init__()
        self.shape, self.format = list(shape), format
        dtypes = {CODES: format.stored_dtype, ABSMAX: "float32"}
        for part, of_part in format.shapes(shape).items():
            zeros = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), trainable=False)
            setattr(self, part, self.create_parameter(of_part, attr=zeros, dtype=dtypes[part]))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., I] times the matrix, plus a bias [O], to [..., O]."""
        y = _Product.apply(x, (self,))
        return y if bias is None else y + bias

    @paddle.no_grad()
    def dense(self, dtype: Any) -> Tensor:
        """The matrix, or of one that is cut over ranks this rank's part as a distributed tensor."""
        codes, absmax = self.codes, self.absmax
        if not codes.is_dist():
            return dequantise(codes, absmax, self.format).astype(dtype)
        local = dequantise(codes._local_value(), absmax._local_value(), self.format)
        return dtensor_from_local(local.astype(dtype), codes.process_mesh, codes.placements)

    def grouped_product(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Consecutive rows of x [N, I], so many `counts` for each matrix of this rank's part of a stack, to [N, O]."""
        return _GroupedProduct.apply(x, (self,), list(counts))

    @paddle.no_grad()
    def one(self, number: int, dtype: Any) -> Tensor:
        """A matrix of this rank's part of a stack."""
        codes, absmax = (part._local_value() if part.is_dist() else part for part in (self.codes, self.absmax))
        return dequantise(codes[number], absmax[number], self.format).astype(dtype)


class QuantisedLinear(nn.Layer):
    """A linear layer whose matrix is quantised."""

    def __init__(self, linear: nn.Linear, format: BlockFormat):
        super().__init__()
        self.weight, self.bias = QuantisedMatrix(linear.weight.shape, format), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return self.weight.product(x, self.bias)


class _Product(PyLayer):
    """x W; W is made for the product, and again for its gradient. It comes in a tuple, which PyLayer does not look
    into: under sharding stage 3 its codes have other memory by the time of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: tuple[QuantisedMatrix]) -> Tensor:
        (ctx.matrix,), ctx.dtype = matrices, x.dtype
        return ctx.matrix.matmul(x, ctx.matrix.dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.matrix.matmul(gradient, ctx.matrix.dense(ctx.dtype), transpose_y=True)


class _GroupedProduct(PyLayer):
    """`_Product` for a stack: one matrix after the other is made, but for those without rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stacks: tuple[QuantisedMatrix], counts: list[int]) -> Tensor:
        (ctx.stack,), ctx.dtype, ctx.counts = stacks, x.dtype, counts
        return by_matrix(x, counts, lambda rows, number: ctx.stack.matmul(rows, ctx.stack.one(number, x.dtype)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        stack, dtype = ctx.stack, ctx.dtype
        return by_matrix(
            gradient, ctx.counts, lambda rows, number: stack.matmul(rows, stack.one(number, dtype), transpose_y=True)
        )


def by_matrix(x: Tensor, counts: Sequence[int], product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Consecutive rows of x [N, I], so many `counts` for each matrix, to [N, O].

    `product` is that of some rows with the matrix of a number. It is not called for matrices without rows, but once
    where there are no rows at all.
    """
    groups = [(number, rows) for number, rows in enumerate(x.split(counts)) if counts[number]]
    if not groups:
        return product(x, 0)  # no rows, but of the right width
    return paddle.concat([product(rows, number) for number, rows in groups])


def dequantise(codes: Tensor, absmax: Tensor, format: BlockFormat) -> Tensor:
    """The matrix of plain tensors, in float32: as `BlockFormat.dequantise`, on any device."""
    if codes.place.is_cpu_place():  # Paddle's gather takes five times as long there as NumPy's
        return from_dlpack(format.dequantise(codes.numpy(), absmax.numpy()))
    return dequantise_on_device(codes, absmax, format)


def dequantise_on_device(codes: Tensor, absmax: Tensor, format: BlockFormat) -> Tensor:
    """The same by Paddle's operations."""
    num_blocks, num_outputs = absmax.shape
    if format.dtype == "int8":
        found, absmax = codes.astype("float32"), absmax * float(np.float32(1 / 127))
    else:
        flat = codes.astype("int32").flatten()
        halves = [paddle.gather(paddle.to_tensor(levels), flat) for levels in byte_levels(format.dtype)]
        found = paddle.stack([half.reshape(codes.shape) for half in halves], 1)
        del flat, halves
    return found.reshape([num_blocks, -1, num_outputs]).multiply_(absmax.unsqueeze(1)).reshape([-1, num_outputs])


def quantise_matrices(model: nn.Layer, modules: Sequence[str], format: BlockFormat) -> None:
    """Let these layers, with adapters or without, keep their matrix or stack quantised.

    Args:
        model: without memory (`paddle.LazyGuard`); its quantised matrices have none either.
        modules: names of linear layers and stacks of routed experts.
        format: of their matrices.
    """
    found = dict(model.named_sublayers(include_self=True))
    for name in modules:
        layer = found[name]
        if type(layer) is nn.Linear:
            owner, _, attribute = name.rpartition(".")
            setattr(found[owner], attribute, QuantisedLinear(layer, format))
        else:
            shape = layer.weight.shape
            del layer.weight  # else Paddle takes nothing but a parameter in its place
            layer.weight = QuantisedMatrix(shape, format)
