"""Operations on gradients and parameters, outside the graph: the norm of gradients, their scale, and an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import paddle

from llmsuite.base.typing import Tensor

T = TypeVar("T")
CHUNK = 1 << 22
"""Elements of a 16-bit tensor that are in float32 at a time."""


def square_sum(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """The sum of squares of all elements of tensors, each multiplied by a factor first, so that squares do not
    overflow: a scalar [] in float32."""
    squares = []
    for x in tensors:
        if x.dtype == paddle.float32:
            squares.append(x.scale(factor).square_().sum())
            continue
        flat = x.flatten()
        for first in range(0, flat.shape[0], CHUNK):
            squares.append(flat[first : first + CHUNK].astype("float32").scale_(factor).square_().sum())
    return paddle.add_n(squares)


def add_gradient(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to the sum of earlier ones, in place. A 16-bit gradient may be added to a sum in float32."""
    if total.dtype == gradient.dtype or total.place.is_gpu_place():
        # CUDA's kernel reads a 16-bit number, and adds it as float32: the same numbers, without a copy in float32
        total.add_(gradient)
    else:
        total.add_(gradient.astype(total.dtype))


def scale(x: Tensor, factor: float) -> None:
    """Multiply x by a number, in place. A 16-bit tensor is rounded once, by a factor that is not rounded."""
    if x.dtype == paddle.float32:
        x.scale_(factor)
        return
    flat = x.flatten()
    parts = [flat[i : i + CHUNK].astype("float32").scale_(factor).astype(x.dtype) for i in range(0, x.size, CHUNK)]
    x.copy_(paddle.concat(parts).reshape(x.shape), False)


def taken(values: Sequence[T], numbers: Sequence[int]) -> list[T]:
    """Return the values at these indices: those of the parameters that are updated together."""
    return [values[number] for number in numbers]


@dataclasses.dataclass(frozen=True)
class OptimizerOps:
    """The operations that an optimizer computes with; they have no gradients."""

    square_sum: Callable[[Sequence[Tensor], float], Tensor] = square_sum
    """For the norm of the gradients."""
    scale: Callable[[Tensor, float], None] = scale
    """For gradients before an update."""
    adamw: Callable[..., None] | None = None
    """AdamW update of plain float32 parameters in place, from their gradients, a factor of these, their learning rates,
    [both moments, powers of both betas], the betas, epsilon and weight decays. All have had as many updates. None:
    Paddle's own."""
