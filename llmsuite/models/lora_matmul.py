"""Products of one input with several matrices, some of them with low-rank adapters, in one operation.

The input is rounded once for all of them, and sums of products are computed in one pass where a device can. The same
tensors are rounded as layer by layer: x, scale (x A), and the gradients of y and of these.

Shapes: I inputs and O outputs of a matrix, R rank of its adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle.autograd import PyLayer

from llmsuite.base.typing import Tensor
from llmsuite.devices.matmul_ops import MatmulOps


class Factors(NamedTuple):
    """An adapter that adds scale (x A) B."""

    first: Tensor
    """A [I, R]."""
    second: Tensor
    """B [R, O]."""
    scale: float


class LowRankLayer:
    """A linear layer with a low-rank adapter, which a device may compute in one operation with its matrix."""

    weight: Tensor
    """W [I, O]."""
    bias: Tensor | None
    reduce_partial_sum: Callable[[Tensor], Tensor]
    """Reduction over tensor parallel ranks of each product with x, where a rank has only a partial sum."""
    low_rank_kernel: Callable[[Any, Tensor], Tensor] | None = None
    """Computes such a layer from x as `multiply` does; None for `multiply`."""

    def is_low_rank(self) -> bool:
        """True while the layer is W and factors and nothing more, so that it may be computed from `factors`."""
        raise AssertionError(f"{type(self).__name__} has to define `is_low_rank`")

    def factors(self) -> Factors | None:
        """The factors of the adapter; None for W alone."""
        raise AssertionError(f"{type(self).__name__} has to define `factors`")

    def multiply(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O], one product after the other."""
        raise AssertionError(f"{type(self).__name__} has to define `multiply`")


def lora_matmul(
    matmuls: MatmulOps, x: Tensor, matrices: Sequence[tuple[Tensor, Factors | None]], round_outputs: bool
) -> list[Tensor]:
    """x W + scale (x A) B, [..., O], for each matrix W [I, O] and its adapter, if it has one: for plain tensors.

    With `round_outputs` the sum of both products is rounded as `MatmulOps.round_activation` does.
    """
    tensors = []
    scales = list[float | None]()
    for matrix, factors in matrices:
        tensors.append(matrix)
        if factors is not None:
            tensors += [factors.first, factors.second]
        scales.append(None if factors is None else factors.scale)
    if not paddle.is_grad_enabled() or all(t.stop_gradient for t in (x, *tensors)):
        return _forward(matmuls, matmuls.round_activation(x), _by_matrix(tensors, scales), round_outputs)[0]
    return list(_LoraProducts.apply(x, *tensors, (matmuls, scales, round_outputs)))


_ByMatrix = list[tuple[list[int], Tensor, list[Tensor], float]]
"""For each matrix: the indices of its tensors among all, the matrix, its two factors if it has some, and the scale."""


def _by_matrix(tensors: Sequence[Tensor], scales: Sequence[float | None]) -> _ByMatrix:
    by_matrix = _ByMatrix()
    first = 0
    for scale in scales:
        count = 1 if scale is None else 3
        indices = list(range(first, first + count))
        matrix, *factors = (tensors[index] for index in indices)
        by_matrix.append((indices, matrix, factors, scale or 0.0))
        first += count
    return by_matrix


def _forward(
    matmuls: MatmulOps, rounded: Tensor, parts: _ByMatrix, round_outputs: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and the rounded scale (x A) of each adapter."""
    outputs = list[Tensor]()
    low_ranks = list[Tensor]()
    for _, matrix, factors, scale in parts:
        pairs = [(rounded, matrix)]
        if factors:
            first, second = factors
            low_rank = matmuls.round_activation(_scaled(matmuls.matmul(rounded, first, False, False), scale))
            low_ranks.append(low_rank)
            pairs.append((low_rank, second))
        outputs.append(matmuls.sum_of_products(pairs, False, round_outputs))
    return outputs, low_ranks


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x.scale_(scale)


def _rows(x: Tensor) -> Tensor:
    return x.reshape([-1, x.shape[-1]])


class _LoraProducts(PyLayer):
    """`lora_matmul`. Arguments that are no tensors come in a tuple, which PyLayer does not inspect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *tensors, (matmuls, scales, round_outputs) = rest
        ctx.matmuls = matmuls
        ctx.scales = scales
        ctx.is_x_rounded = x.dtype != paddle.float32
        ctx.needs_x_grad = not x.stop_gradient
        ctx.needs_grads = [not tensor.stop_gradient for tensor in tensors]
        rounded = matmuls.round_activation(x)
        outputs, low_ranks = _forward(matmuls, rounded, _by_matrix(tensors, scales), round_outputs)
        # the parameters themselves: under sharding stage 3 they have other memory by the time of the backward pass
        ctx.save_for_backward(*tensors, *low_ranks, *([rounded] if any(ctx.needs_grads) else []))
        return tuple(outputs)

    @staticmethod
    @paddle.no_grad()
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        matmuls = ctx.matmuls
        saved = ctx.saved_tensor()
        num_tensors = len(ctx.needs_grads)
        low_ranks = iter(saved[num_tensors:])
        x_rows = _rows(saved[-1]) if any(ctx.needs_grads) else None
        tensor_grads: list[Tensor | None] = [None] * num_tensors
        pairs = list[tuple[Tensor, Tensor]]()
        for gradient, (indices, matrix, factors, scale) in zip(
            gradients, _by_matrix(saved[:num_tensors], ctx.scales), strict=True
        ):
            output_grad = matmuls.round_activation(gradient)
            pairs.append((output_grad, matrix))
            if ctx.needs_grads[indices[0]]:
                tensor_grads[indices[0]] = matmuls.matmul(x_rows, _rows(output_grad), True, False)
            if not factors:
                continue
            low_rank = next(low_ranks)
            (first, second) = factors
            low_rank_grad = matmuls.round_activation(_scaled(matmuls.matmul(output_grad, second, False, True), scale))
            pairs.append((low_rank_grad, first))
            if ctx.needs_grads[indices[1]]:
                tensor_grads[indices[1]] = matmuls.matmul(x_rows, _rows(low_rank_grad), True, False)
            if ctx.needs_grads[indices[2]]:
                tensor_grads[indices[2]] = matmuls.matmul(_rows(low_rank), _rows(output_grad), True, False)
        x_grad = matmuls.sum_of_products(pairs, True, ctx.is_x_rounded) if ctx.needs_x_grad else None
        return (x_grad, *tensor_grads)
