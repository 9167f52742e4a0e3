"""The values that interventions on hidden states begin with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmsuite.checkpoint.reft_dir import orthonormal
from llmsuite.models.reft_shapes import BIAS, ROTATION, SOURCE
from llmsuite.parallel.fill import ReadSlice
from llmsuite.train.initial_values import initial_values


def with_rotations(read: ReadSlice, seed: int) -> ReadSlice:
    """The values of a model and of its interventions, which change nothing at first: W begins as R, and b is zero.

    R is that of a normal matrix, so any direction is as likely as any other. pyreft begins with a W of its own, so that
    its first step is one of another model.

    Args:
        read: values of the model.
        seed: of the recipe.
    """

    def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        module, _, kind = name.rpartition(".")
        if kind in (ROTATION, SOURCE):
            matrix = initial_values(seed, f"{module}.{ROTATION}", shape, shape[0] ** -0.5)
            return (matrix if kind == ROTATION else orthonormal(matrix))[tuple(index)]
        if kind == BIAS:
            return np.zeros([part.stop - part.start for part in index], "float32")
        return read(name, shape, index)

    return initial
