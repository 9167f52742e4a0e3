"""Initial values of adapters on matrices, of interventions and of prefixes, with which a model computes what it did."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from llmsuite.adapters.parameters import is_factor
from llmsuite.adapters.prefix_shapes import INNER, INNER_BIAS, NETWORK, PREFIX_KEY, PREFIX_VALUE, TABLE
from llmsuite.adapters.reft_shapes import BIAS, ROTATION, SOURCE, orthonormal
from llmsuite.base.typing import ReadSlice
from llmsuite.models.adapter_method import AdaptedModel, AdapterConfig
from llmsuite.models.block_quant import BlockFormat
from llmsuite.models.initial_values import initial_values
from llmsuite.models.shard_plan import ShardPlan


def with_adapter_values(
    read: ReadSlice,
    seed: int,
    shapes: Mapping[str, Sequence[int]],
    config: AdapterConfig,
    plan: ShardPlan | None = None,
    base_format: BlockFormat | None = None,
    quantised: Collection[str] = (),
) -> ReadSlice:
    """Extend `read` by the initial values of adapters, see `AdapterMethod.initial`.

    Args:
        read: values of the model, W without quantisation.
        seed: seed of the recipe.
        shapes: shape of every parameter of the full model.
        config: method, rank and scale of the adapters.
        plan: shard plan of the family; None for a model without embedding.
        base_format: format of the matrices that are stored quantised; None where none is.
        quantised: names of the modules whose W is.
    """

    def rounded(module: str, matrix: np.ndarray) -> np.ndarray:
        if module not in quantised:
            return matrix
        assert base_format is not None
        return base_format.rounded(matrix)

    def is_cut_by_inputs(module: str) -> bool:
        weight = f"{module}.weight"
        return plan is not None and plan.dim(weight) == 0 and not plan.is_expert(weight)

    in_full = base_format is not None and base_format.is_of_full
    embedding = None if plan is None else plan.embedding
    model = AdaptedModel(read, seed, shapes, config, embedding, rounded, in_full, is_cut_by_inputs)
    of_method = config.method.initial(model)

    def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        is_own = name.rpartition(".")[2] in config.method.parameters
        return of_method(name, shape, index) if is_own else read(name, shape, index)

    return initial


# interventions


def with_intervention_values(read: ReadSlice, seed: int) -> ReadSlice:
    """Extend `read` by the initial values of interventions, which change nothing at first: W = R, and b is zero.

    R is the orthonormal factor of a normal matrix, so its directions are uniformly distributed. pyreft initializes W
    independently of R, so its model differs from the base model from the first step on.

    Args:
        read: values of the model.
        seed: seed of the recipe.
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


# prefixes


def with_prefix_values(read: ReadSlice, seed: int, shapes: Mapping[str, Sequence[int]]) -> ReadSlice:
    """Extend `read` by the initial values of prefixes: normal values with the standard deviation of PaddleNLP.

    It is that of Xavier (Glorot and Bengio 2010), for one table [P, elements per token of all layers], or for the
    embedding and the two layers of a network, the second of which has the outputs of all layers. Biases are zero. HF
    PEFT uses a standard deviation of 1, with which the prefix dominates the attention at first.

    Args:
        read: values of the model.
        seed: seed of the recipe.
        shapes: shape of every parameter of the full model, prefixes included.
    """
    stds = _prefix_stds({name: shape for name, shape in shapes.items() if is_factor(name)})

    def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if name not in stds:
            return read(name, shape, index)
        if not stds[name]:
            return np.zeros([part.stop - part.start for part in index], "float32")
        return initial_values(seed, name, shape, stds[name], index)

    return initial


def _prefix_stds(shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the standard deviation of each parameter of a prefix, by its name."""
    kinds = {name: name.rpartition(".")[2] for name in shapes}
    outputs = sum(math.prod(shape[1:]) for shape in shapes.values() if len(shape) == 3)  # per token, in all layers
    first = next(iter(shapes.values()))
    found = {}
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
