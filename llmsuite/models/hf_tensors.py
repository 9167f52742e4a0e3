"""Which tensors of an HF model hold a parameter. Imports no Paddle."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class HfTensors:
    """A parameter as one tensor, a part of one, or several that are stacked. Dims are those in memory: matrices are
    [inputs, outputs]."""

    names: tuple[str, ...]
    """The tensor; or, with `stacked`, one for each index of the parameter's first dim."""
    stacked: bool = False
    part: int = 0
    """Which of the `num_parts` equal parts along the tensor's last dim the parameter is."""
    num_parts: int = 1
    copies: tuple[str, ...] = ()
    """Tensors that are written with the same values, and not read."""
