"""Frozen matrices that are stored quantised and dequantised only for each product, for one card.

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

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.models import llm_int8
from llmsuite.models.block_quant import LLM_INT8, BlockFormat, byte_levels
from llmsuite.models.dynamic_map import BLOCK, dynamic_map
from llmsuite.models.linear import WithMatmul, add_bias, is_matrix
from llmsuite.models.scale_quant import dequantise_scales


class GroupedMatrix:
    """A stack of matrices that is no tensor, and multiplies by itself."""

    def grouped_product(self, x: Tensor, counts: Any) -> Tensor:
        """Grouped product, [N, O]: consecutive rows of x [N, I], `counts[i]` of them times matrix i."""
        raise AssertionError(f"{type(self).__name__} has to define `grouped_product`")


class QuantisedMatrix(nn.Layer, WithMatmul, GroupedMatrix):
    """A frozen matrix [I, O], or a stack of them, stored as codes and block scales instead of as a parameter."""

    codes: Tensor
    absmax: Tensor
    """Scales; their codes where the format quantises them."""
    nested_absmax: Tensor
    nested_offset: Tensor
    """There only where the format quantises the scales."""
    first_scale: tuple[int, int] = (0, 0)
    """Row and output of the full scales at which this rank's slice begins."""

    def __init__(self, shape: Sequence[int], format: BlockFormat):
        super().__init__()
        self.shape = list(shape)
        self.format = format
        dtypes = format.dtypes
        for part, of_part in format.shapes(shape).items():
            zeros = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), trainable=False)
            setattr(self, part, self.create_parameter(of_part, attr=zeros, dtype=dtypes[part]))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., I] times the matrix, plus a bias [O], to [..., O]."""
        return add_bias(_Product.apply(x, (self,)), bias)

    @paddle.no_grad()
    def dense(self, dtype: Any) -> Tensor:
        """The dequantised matrix; of one that is sharded over ranks a distributed tensor with this rank's shard."""
        codes = self.codes
        local = dequantise(_local(codes), self._scales(), self.format).astype(dtype)
        return dtensor_from_local(local, codes.process_mesh, codes.placements) if codes.is_dist() else local

    def grouped_product(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Grouped product, [N, O]: consecutive rows of x [N, I], `counts[i]` of them times matrix i of this rank's
        shard of a stack."""
        return _GroupedProduct.apply(x, (self,), list(counts))

    @paddle.no_grad()
    def one(self, number: int, dtype: Any) -> Tensor:
        """The dequantised matrix [I, O] with this index in this rank's shard of a stack."""
        return dequantise(_local(self.codes)[number], self._scales(number), self.format).astype(dtype)

    def _scales(self, number: int | None = None) -> Tensor:
        """This rank's scales in float32, [I / block, O]; of a stack, those of the matrix with this index."""
        absmax = _local(self.absmax)
        if number is not None:
            absmax = absmax[number]
        if not self.format.double_quant:
            return absmax
        nested_absmax = _local(self.nested_absmax)
        nested_offset = _local(self.nested_offset)
        if number is not None:
            nested_absmax = nested_absmax[number]
            nested_offset = nested_offset[number]
        num_rows = self.shape[-2] // self.format.block
        return dequantise_scale_codes(absmax, nested_absmax, nested_offset, num_rows, self.first_scale)


class LlmInt8Matrix(QuantisedMatrix):
    """A frozen matrix whose products are those of LLM.int8; gradients are those of the dequantised matrix."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., I] times the matrix, plus a frozen bias [O], to [..., O]."""
        return _Int8Product.apply(x, (self, bias))

    def grouped_product(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Grouped product, [N, O], as that of the base class."""
        return _GroupedInt8Product.apply(x, (self,), list(counts))

    @paddle.no_grad()
    def int8_product(self, x: Tensor, bias: Tensor | None = None, number: int | None = None) -> Tensor:
        """x [N, I] times the matrix, or that with an index in a stack, plus a bias, to [N, O]."""
        codes = _local(self.codes)
        return llm_int8.product(x, codes if number is None else codes[number], self._scales(number), bias)


def quantised_matrix(shape: Sequence[int], format: BlockFormat) -> QuantisedMatrix:
    """A matrix [I, O] or a stack of them in a format."""
    cls = LlmInt8Matrix if format.dtype == LLM_INT8 else QuantisedMatrix
    return cls(shape, format)


class QuantisedLinear(nn.Layer):
    """A linear layer whose matrix is quantised."""

    def __init__(self, linear: nn.Linear, format: BlockFormat):
        super().__init__()
        self.weight = quantised_matrix(linear.weight.shape, format)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return self.weight.product(x, self.bias)


class _Product(PyLayer):
    """x W; W is dequantised for the product, and again for its gradient, so that no dense copy is kept between them. It
    comes in a tuple, which PyLayer does not inspect: under sharding stage 3 its codes have other memory by the time of
    the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: tuple[QuantisedMatrix]) -> Tensor:
        (ctx.matrix,) = matrices
        ctx.dtype = x.dtype
        return ctx.matrix.matmul(x, ctx.matrix.dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.matrix.matmul(gradient, ctx.matrix.dense(ctx.dtype), transpose_y=True)


class _GroupedProduct(PyLayer):
    """`_Product` for a stack: matrices are dequantised one after the other, and those without rows not at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stacks: tuple[QuantisedMatrix], counts: list[int]) -> Tensor:
        (ctx.stack,) = stacks
        ctx.dtype = x.dtype
        ctx.counts = counts
        return by_matrix(x, counts, lambda rows, number: ctx.stack.matmul(rows, ctx.stack.one(number, x.dtype)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        stack = ctx.stack
        dtype = ctx.dtype
        return by_matrix(
            gradient, ctx.counts, lambda rows, number: stack.matmul(rows, stack.one(number, dtype), transpose_y=True)
        )


class _Int8Product(PyLayer):
    """The product of `LlmInt8Matrix`, whose gradient is that of the dequantised matrix. The bias is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operands: tuple[LlmInt8Matrix, Tensor | None]) -> Tensor:
        ctx.matrix, bias = operands
        ctx.dtype = x.dtype
        *others, num_inputs = x.shape
        return ctx.matrix.int8_product(x.reshape([-1, num_inputs]), bias).reshape([*others, -1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.matrix.matmul(gradient, ctx.matrix.dense(ctx.dtype), transpose_y=True)


class _GroupedInt8Product(_GroupedProduct):
    """`_Int8Product` for a stack, whose matrices have the outliers of their own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stacks: tuple[QuantisedMatrix], counts: list[int]) -> Tensor:
        (ctx.stack,) = stacks
        assert isinstance(ctx.stack, LlmInt8Matrix)
        ctx.dtype = x.dtype
        ctx.counts = counts
        return by_matrix(x, counts, lambda rows, number: ctx.stack.int8_product(rows, number=number))


def by_matrix(x: Tensor, counts: Sequence[int], product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Grouped product, [N, O]: consecutive rows of x [N, I], `counts[i]` of them times matrix i.

    `product` multiplies rows by the matrix with an index. It is not called for matrices without rows, but once where
    there are no rows at all, for the number of outputs.
    """
    groups = [(number, rows) for number, rows in enumerate(x.split(counts)) if counts[number]]
    if not groups:
        return product(x, 0)  # [0, O]
    return paddle.concat([product(rows, number) for number, rows in groups])


def _local(part: Tensor) -> Tensor:
    """This rank's shard of a part of a matrix."""
    return part._local_value() if part.is_dist() else part


def dequantise_scale_codes(
    codes: Tensor, nested_absmax: Tensor, nested_offset: Tensor, num_rows: int, first: tuple[int, int]
) -> Tensor:
    """Scales in float32 of plain tensors on any device, equal to `scale_quant.dequantise_scales`."""
    if codes.place.is_cpu_place():
        parts = (array_of(codes), array_of(nested_absmax), array_of(nested_offset))
        return from_dlpack(dequantise_scales(*parts, num_rows, first))
    return dequantise_scales_on_device(codes, nested_absmax, nested_offset, num_rows, first)


def dequantise_scales_on_device(
    codes: Tensor, nested_absmax: Tensor, nested_offset: Tensor, num_rows: int, first: tuple[int, int]
) -> Tensor:
    """`dequantise_scale_codes` by Paddle's operations."""
    rows, outputs = (paddle.arange(start, start + size) for start, size in zip(first, codes.shape))
    numbers = (outputs * num_rows + rows.unsqueeze(1)) // BLOCK
    values = paddle.gather(tensor_of(dynamic_map(True)), codes.astype("int32").flatten())
    scales = paddle.gather(nested_absmax, numbers.flatten())
    return (values * scales + nested_offset).reshape(codes.shape)


def dequantise(codes: Tensor, absmax: Tensor, format: BlockFormat) -> Tensor:
    """The matrix in float32, [I, O], of plain tensors on any device, equal to `BlockFormat.dequantise`."""
    if codes.place.is_cpu_place():  # Paddle's gather takes five times as long there as NumPy's
        return from_dlpack(format.dequantise(array_of(codes), array_of(absmax)))
    return dequantise_on_device(codes, absmax, format)


def dequantise_on_device(codes: Tensor, absmax: Tensor, format: BlockFormat) -> Tensor:
    """`dequantise` by Paddle's operations."""
    num_blocks, num_outputs = absmax.shape
    if format.has_steps:
        found = codes.astype("float32")
        absmax = absmax * float(np.float32(1 / 127))
    else:
        flat = codes.astype("int32").flatten()
        halves = [paddle.gather(tensor_of(levels), flat) for levels in byte_levels(format.dtype)]
        found = paddle.stack([half.reshape(codes.shape) for half in halves], 1)
        del flat, halves
    return found.reshape([num_blocks, -1, num_outputs]).multiply_(absmax.unsqueeze(1)).reshape([-1, num_outputs])


def quantise_matrices(model: nn.Layer, modules: Sequence[str], format: BlockFormat) -> None:
    """Make these layers, with adapters or without, store their matrix or stack quantised.

    Args:
        model: not materialised (`paddle.LazyGuard`); nor are its quantised matrices afterwards.
        modules: names of linear layers and stacks of routed experts.
        format: block format of their matrices.
    """
    found = dict(model.named_sublayers(include_self=True))
    for name in modules:
        layer = found[name]
        if is_matrix(layer):
            owner, _, attribute = name.rpartition(".")
            setattr(found[owner], attribute, QuantisedLinear(layer, format))
        else:
            shape = layer.weight.shape
            del layer.weight  # else Paddle accepts only a parameter under this name
            layer.weight = quantised_matrix(shape, format)
