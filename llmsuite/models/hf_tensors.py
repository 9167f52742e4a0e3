"""Mapping of a parameter to the tensors of an HF model. Imports neither Paddle nor NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

_Dim = TypeVar("_Dim")


@dataclasses.dataclass(frozen=True)
class HfTensors:
    """A parameter as one tensor, a part of one, or a stack of several. Dims are those in memory: matrices are [inputs,
    outputs]."""

    names: tuple[str, ...]
    """The tensor; or, with `stacked`, one for each index of the parameter's first dim."""
    stacked: bool = False
    part: int = 0
    """Index of the parameter among those that are joined in the tensor."""
    sizes: tuple[int, ...] = ()
    """Sizes of the parameters that are joined in the tensor along its last dim, in their order; empty for a tensor that
    is one parameter."""
    alternates: bool = False
    """True where the columns of the tensor are of each of its parameters in turn: they have equal sizes."""
    copies: tuple[str, ...] = ()
    """Tensors that are written with the same values, and not read."""
    is_reversed: bool = False
    """True where HF stores all dims in the other order, such as those of a convolution, [channels, 1, taps]; else only
    the last two, those of a matrix, change places."""

    @property
    def num_parts(self) -> int:
        """Number of parameters in the tensor."""
        return max(1, len(self.sizes))

    @property
    def columns(self) -> slice:
        """The place of the parameter along the last dim of the tensor: all of it, where it is alone there."""
        if not self.sizes:
            return slice(None)
        if self.alternates:
            return slice(self.part, None, self.num_parts)
        start = sum(self.sizes[: self.part])
        return slice(start, start + self.sizes[self.part])

    def transposed_dims(self, dims: Sequence[_Dim]) -> tuple[_Dim, ...]:
        """Values for the dims of a tensor in the other order: from HF's to ours, or from ours to HF's."""
        if self.is_reversed:
            return tuple(dims[::-1])
        return (*dims[:-2], *dims[-2:][::-1])

    def transposed(self, value: np.ndarray) -> np.ndarray:
        """The values of a tensor in the other order of its dims."""
        return value.transpose(self.transposed_dims(range(value.ndim)))
