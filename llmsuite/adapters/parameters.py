"""The parameters that adapters add to a model: their names, shapes, and dims that tensor parallelism cuts. Imports no
Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.adapters.methods import METHODS
from llmsuite.adapters.prefix_shapes import INNER, INNER_BIAS, OUTER, PREFIX_KEY, PREFIX_VALUE, TABLE
from llmsuite.adapters.reft_shapes import BIAS, ROTATION, SOURCE
from llmsuite.models.adapter_method import AdapterMethod, AdapterParameter
from llmsuite.models.head import SCORE
from llmsuite.models.shard_plan import ShardPlan

_OF_HEADS: Mapping[str, AdapterParameter] = {
    **dict.fromkeys((PREFIX_KEY, PREFIX_VALUE), AdapterParameter(by_outputs=1)),
    **{kind: AdapterParameter(by_outputs=1 if kind.endswith("weight") else 0) for kind in OUTER},
}
"""Parameters of prefixes, which are sharded by heads: as the matrix of keys."""
_NETWORK = frozenset((TABLE, INNER, INNER_BIAS))
"""Parameters of the prefix network."""
_REPLICATED = frozenset((ROTATION, SOURCE, BIAS)) | _NETWORK
"""Parameters of interventions and of the prefix network."""


def parameter_of(name: str) -> AdapterParameter | None:
    """The description of a parameter of an adapter on a matrix, by its name; None for other parameters."""
    kind = name.rpartition(".")[2]
    return next((method.parameters[kind] for method in METHODS.values() if kind in method.parameters), None)


def is_factor(parameter: str) -> bool:
    """True if a parameter belongs to an adapter, an intervention or a prefix."""
    kind = parameter.rpartition(".")[2]
    return kind in _OF_HEADS or kind in _REPLICATED or parameter_of(parameter) is not None


def is_prefix(parameter: str) -> bool:
    """True if a parameter belongs to a prefix."""
    kind = parameter.rpartition(".")[2]
    return kind in _OF_HEADS or kind in _NETWORK


def is_transposed(parameter: str, names: Any) -> bool:
    """True if PyTorch stores a matrix of a model transposed: a linear weight, or a factor of an adapter.

    Args:
        parameter: its name.
        names: of the family.
    """
    return parameter_of(parameter) is not None or bool(names.is_linear(parameter))


def is_fixed(parameter: str) -> bool:
    """True if a parameter of an adapter is frozen at its starting value; it is saved with the others."""
    found = parameter_of(parameter)
    return found is not None and not found.is_trained


def is_trained(parameter: str) -> bool:
    """True if a parameter of a model with adapters is trained: those of adapters, and the score head, which is new."""
    return (is_factor(parameter) and not is_fixed(parameter)) or parameter == SCORE


def shard_dim(plan: ShardPlan, parameter: str) -> int | None:
    """The dim of a parameter of a model with adapters that is sharded over tp; None where it is replicated.

    Parameters of an adapter are sharded with its matrix: in x A B, A along its inputs, B along its outputs; those of a
    stack of experts along the experts, as the stack. Prefixes are sharded by heads, as the matrix of keys.
    """
    module, _, kind = parameter.rpartition(".")
    if kind in _REPLICATED:
        return None
    own = _OF_HEADS.get(kind) or parameter_of(parameter)
    if own is None:
        return plan.dim(parameter)
    dim = plan.dim(f"{module}.k_proj.weight" if kind in _OF_HEADS else f"{module}.weight")
    if dim is None or plan.is_expert(parameter):
        return dim
    return own.by_inputs if dim == 0 else own.by_outputs


def factor_shapes(method: AdapterMethod, rank: int, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of an adapter by name, in the order of the layer.

    Args:
        method: of the adapter.
        rank: rank of the adapter.
        shape: shape of its matrix, [inputs, outputs], or of a stack, [experts, inputs, outputs].
    """
    *stacked, num_inputs, num_outputs = shape
    of_one = method.shapes(rank, num_inputs, num_outputs)
    return {kind: (*stacked, *size) for kind, size in of_one.items()}


def with_adapters(
    shapes: Mapping[str, Sequence[int]], modules: Sequence[str], rank: int, method: AdapterMethod
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of the adapters on these modules."""
    result: dict[str, tuple[int, ...]] = {}
    adapted = set(modules)
    factors = {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        result[name] = tuple(shape)
        if module in adapted and name.endswith(".weight"):
            own = factor_shapes(method, rank, shape)
            factors[module] = {f"{module}.{kind}": of_kind for kind, of_kind in own.items()}
    for of_module in factors.values():
        result |= of_module
    return result
