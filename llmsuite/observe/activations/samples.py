"""Samples of parameters and gradients: all values of a small tensor, some of a large one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

MAX_VALUES = 1 << 18
"""Most values that are kept of a tensor."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some values of a tensor, and the norm of all of them."""

    values: np.ndarray
    """[at most `MAX_VALUES`], float32; from the same positions in tensors of the same shape."""
    norm: float
    """Euclidean norm of the full tensor."""
    shape: tuple[int, ...]

    def about(self) -> dict[str, Any]:
        """JSON data that is stored in addition to the values."""
        return {"norm": self.norm, "shape": list(self.shape)}


def sample_of(values: np.ndarray) -> Sample:
    """A sample of a tensor, from positions that depend only on its size."""
    flat = values.reshape(-1)
    # norm in float64: a sum of many squares in float32 would lose digits
    norm = 0.0
    if flat.size:
        norm = float(np.linalg.norm(flat.astype("float64")))
    if flat.size > MAX_VALUES:
        flat = flat[np.random.default_rng(flat.size).integers(0, flat.size, MAX_VALUES)]
    return Sample(flat, norm, values.shape)
