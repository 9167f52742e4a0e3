"""Products of one input with several matrices, low-rank adapters beside some of them, in one operation.

The input is rounded once for all of them, and sums of products are made in one pass where a device can. What is
rounded is what it is layer by layer: x, scale (x A), and the gradients of y and of these.

Shapes: I inputs and O outputs of a matrix, R rank of its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle.autograd import PyLayer

from llmsuite.devices.ops import Ops, sum_of_products
from llmsuite.typing import Tensor


class Factors(NamedTuple):
    """An adapter that adds scale (x A) B."""

    first: Tensor
    """A [I, R]."""
    second: Tensor
    """B [R, O]."""
    scale: float


def lora_products(
    ops: Ops, x: Tensor, matrices: Sequence[tuple[Tensor, Factors | None]], gives_operands: bool
) -> list[Tensor]:
    """x W + scale (x A) B for each matrix W [I, O] and what is beside it: plain tensors. With `gives_operands` the sum
    of both is rounded as `Ops.operand` does."""
    given = [t for matrix, beside in matrices for t in (matrix, *(() if beside is None else beside[:2]))]
    how = (ops, [None if beside is None else beside.scale for _, beside in matrices], gives_operands)
    if not paddle.is_grad_enabled() or all(t.stop_gradient for t in (x, *given)):
        return _forward(ops, ops.operand(x), _by_matrix(given, how[1]), gives_operands)[0]
    return list(_LoraProducts.apply(x, *given, how))


_ByMatrix = list[tuple[list[int], Tensor, list[Tensor], float]]
"""For each matrix: where its tensors stand among all, the matrix, its two factors if it has some, and the scale."""


def _by_matrix(tensors: Sequence[Tensor], scales: Sequence[float | None]) -> _ByMatrix:
    found, at = _ByMatrix(), 0
    for scale in scales:
        places = list(range(at, at + (1 if scale is None else 3)))
        matrix, *factors = (tensors[place] for place in places)
        found.append((places, matrix, factors, scale or 0.0))
        at += len(places)
    return found


def _forward(ops: Ops, kept: Tensor, parts: _ByMatrix, gives_operands: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and what B is multiplied with."""
    ys, narrows = list[Tensor](), list[Tensor]()
    for _, matrix, factors, scale in parts:
        pairs = [(kept, matrix)]
        if factors:
            first, second = factors
            narrow = ops.operand(_scaled(ops.matmul(kept, first, False, False), scale))
            narrows.append(narrow)
            pairs.append((narrow, second))
        ys.append(sum_of_products(ops, pairs, False, gives_operands))
    return ys, narrows


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x.scale_(scale)


def _rows(x: Tensor) -> Tensor:
    return x.reshape([-1, x.shape[-1]])


class _LoraProducts(PyLayer):
    """`lora_products` with a gradient. What is no tensor comes in a tuple, which PyLayer does not look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *tensors, (ops, scales, gives_operands) = rest
        ctx.ops, ctx.scales, ctx.takes_operand = ops, scales, x.dtype != paddle.float32
        ctx.wants_x, ctx.wanted = not x.stop_gradient, [not tensor.stop_gradient for tensor in tensors]
        kept = ops.operand(x)
        ys, narrows = _forward(ops, kept, _by_matrix(tensors, scales), gives_operands)
        # the parameters themselves: under sharding stage 3 they have other memory by the time of the backward pass
        ctx.save_for_backward(*tensors, *narrows, *([kept] if any(ctx.wanted) else []))
        return tuple(ys)

    @staticmethod
    @paddle.no_grad()
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ops, saved, num_tensors = ctx.ops, ctx.saved_tensor(), len(ctx.wanted)
        narrows = iter(saved[num_tensors:])
        kept = _rows(saved[-1]) if any(ctx.wanted) else None
        found: list[Tensor | None] = [None] * num_tensors
        pairs = list[tuple[Tensor, Tensor]]()
        for gradient, (places, matrix, factors, scale) in zip(
            gradients, _by_matrix(saved[:num_tensors], ctx.scales), strict=True
        ):
            given = ops.operand(gradient)
            pairs.append((given, matrix))
            if ctx.wanted[places[0]]:
                found[places[0]] = ops.matmul(kept, _rows(given), True, False)
            if not factors:
                continue
            narrow, (first, second) = next(narrows), factors
            of_narrow = ops.operand(_scaled(ops.matmul(given, second, False, True), scale))
            pairs.append((of_narrow, first))
            if ctx.wanted[places[1]]:
                found[places[1]] = ops.matmul(kept, _rows(of_narrow), True, False)
            if ctx.wanted[places[2]]:
                found[places[2]] = ops.matmul(_rows(narrow), _rows(given), True, False)
        return (sum_of_products(ops, pairs, True, ctx.takes_operand) if ctx.wants_x else None, *found)
