"""Where a parameter lies among the tensors of an HF model. Imports no Paddle."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class HfTensors:
    """One tensor, a part of one, or several that are stacked. Dims are those in memory, matrices [inputs, outputs]."""

    names: tuple[str, ...]
    """The tensor; or, with `stacked`, one for each index of the parameter's first dim."""
    stacked: bool = False
    part: int = 0
    """Which of the `num_parts` equal parts along the tensor's last dim the parameter is."""
    num_parts: int = 1
