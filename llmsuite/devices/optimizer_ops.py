"""Operations on gradients and parameters, outside the graph: the norm of gradients, their scale, and an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import paddle

from llmsuite.base.typing import Tensor


def square_sum(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """The sum of squares of all elements of tensors, each multiplied by a factor first, so that squares do not
    overflow: a scalar []."""
    return paddle.add_n([x.scale(factor).square_().sum() for x in tensors])


def scale(x: Tensor, factor: float) -> None:
    """Multiply x by a number, in place."""
    x.scale_(factor)


@dataclasses.dataclass(frozen=True)
class OptimizerOps:
    """The operations that an optimizer computes with; they have no gradients."""

    square_sum: Callable[[Sequence[Tensor], float], Tensor] = square_sum
    """For the norm of the gradients."""
    scale: Callable[[Tensor, float], None] = scale
    """For gradients before an update."""
    adamw: Callable[..., None] | None = None
    """AdamW update of plain float32 parameters in place, from their gradients, a factor of these, their learning rates,
    [both moments, powers of both betas], the betas, epsilon and weight decays. None: Paddle's own."""
