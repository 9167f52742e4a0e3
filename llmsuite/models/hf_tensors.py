"""Mapping of a parameter to the tensors of an HF model. Imports neither Paddle nor NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

_Dim = TypeVar("_Dim")
_CONVOLUTION = "conv1d.weight"
"""End of the names of convolutions of single channels."""


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


def transposed_dims(theirs: str, dims: Sequence[_Dim]) -> tuple[_Dim, ...]:
    """Values for the dims of a tensor in the other order: of HF's [outputs, inputs] or of ours, [inputs, outputs].

    Args:
        theirs: name of the tensor in HF's files.
        dims: of a matrix or a stack of matrices, of which the last two change places; or of a convolution, which HF
            stores as [channels, 1, taps].
    """
    if theirs.endswith(_CONVOLUTION):
        return tuple(dims[::-1])
    return (*dims[:-2], *dims[-2:][::-1])


def transposed(theirs: str, value: np.ndarray) -> np.ndarray:
    """The values of a tensor in the other order of its dims, see `transposed_dims`."""
    return value.transpose(transposed_dims(theirs, range(value.ndim)))
