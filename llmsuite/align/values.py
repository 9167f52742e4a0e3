"""Values of a parameter or a gradient, few enough to keep: all of a small one, a sample of a large one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

MOST = 1 << 18
"""Elements that are kept of a tensor."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some values of a tensor, and the norm of all of them."""

    values: np.ndarray
    """[at most `MOST`], float32; at the same places of tensors of the same shape."""
    norm: float
    """Euclidean norm of the whole tensor."""
    shape: tuple[int, ...]

    def about(self) -> dict[str, Any]:
        """What is kept beside the values, for JSON."""
        return {"norm": self.norm, "shape": list(self.shape)}


def sample_of(values: np.ndarray) -> Sample:
    """A sample of a tensor; places depend on its size alone."""
    flat = values.reshape(-1)
    norm = float(np.linalg.norm(flat.astype("float64"))) if flat.size else 0.0
    if flat.size > MOST:
        flat = flat[np.random.default_rng(flat.size).integers(0, flat.size, MOST)]
    return Sample(flat, norm, values.shape)
