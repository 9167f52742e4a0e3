"""Types that many packages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Tensor = Any
"""A `paddle.Tensor`: Paddle ships no usable types, and this module imports without it."""
ReadSlice: TypeAlias = "Callable[[str, Sequence[int], Sequence[slice]], np.ndarray]"
"""Reads a slice of a parameter: (name, shape of the full parameter, one slice a dim) -> values."""
