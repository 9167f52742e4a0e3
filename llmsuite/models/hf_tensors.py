"""Mapping of a parameter to the tensors of an HF model. Imports no Paddle."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class HfTensors:
    """A parameter as one tensor, a part of one, or a stack of several. Dims are those in memory: matrices are [inputs,
    outputs]."""

    names: tuple[str, ...]
    """The tensor; or, with `stacked`, one for each index of the parameter's first dim."""
    stacked: bool = False
    part: int = 0
    """Index of the parameter among the `num_parts` equal parts of the tensor along its last dim."""
    num_parts: int = 1
    copies: tuple[str, ...] = ()
    """Tensors that are written with the same values, and not read."""
