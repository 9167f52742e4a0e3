"""The values that prefixes begin with, and networks that make them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmsuite.models.prefix_shapes import INNER, INNER_BIAS, NETWORK, PREFIX_KEY, PREFIX_VALUE, TABLE
from llmsuite.models.targets import is_factor
from llmsuite.parallel.fill import ReadSlice
from llmsuite.train.initial_values import initial_values


def with_prefix_values(read: ReadSlice, seed: int, shapes: Mapping[str, Sequence[int]]) -> ReadSlice:
    """The values of a model and of its prefixes: random numbers as small as those of PaddleNLP.

    Their standard deviation is that of Xavier (Glorot and Bengio 2010), for one table [P, elements of a token] of all
    layers, or for the embedding and the two layers of a network, the second of which has the outputs of all layers.
    Biases are zero. PEFT's tables have a standard deviation of 1, which drowns the text at first.

    Args:
        read: values of the model.
        seed: of the recipe.
        shapes: of every parameter of the whole model, prefixes included.
    """
    stds = _stds({name: shape for name, shape in shapes.items() if is_factor(name)})

    def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if name not in stds:
            return read(name, shape, index)
        if not stds[name]:
            return np.zeros([part.stop - part.start for part in index], "float32")
        return initial_values(seed, name, shape, stds[name], index)

    return initial


def _stds(shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Standard deviation of each parameter of a prefix, by its name."""
    kinds = {name: name.rpartition(".")[2] for name in shapes}
    outputs = sum(math.prod(shape[1:]) for shape in shapes.values() if len(shape) == 3)  # of a token, in all layers
    first, found = next(iter(shapes.values())), {}
    for name, shape in shapes.items():
        if kinds[name] in (PREFIX_KEY, PREFIX_VALUE):
            found[name] = math.sqrt(2 / (first[0] + outputs))
        elif kinds[name] in (TABLE, INNER):
            found[name] = math.sqrt(2 / sum(shape))
        elif len(shape) == 1:
            found[name] = 0.0
        else:
            found[name] = math.sqrt(2 / (shapes[f"{NETWORK}.{INNER_BIAS}"][0] + outputs))
    return found
