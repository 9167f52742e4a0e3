"""Which matrices of a model get adapters, and which parameters are trained with them. Imports no Paddle."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence

from llmsuite.errors import UserError
from llmsuite.models.adapter_sizes import kron_shapes, square_size
from llmsuite.models.head import SCORE
from llmsuite.models.shard_plan import (
    BEHIND,
    BETWEEN,
    FACTORS,
    FIRST_FACTOR,
    MAGNITUDE,
    MIXER,
    SECOND_FACTOR,
    SQUARE,
    START_FIRST,
    START_SECOND,
    ShardPlan,
)


def pick_modules(
    modules: Sequence[str], plan: ShardPlan, patterns: Sequence[str] | None, key: str = "lora.target_modules"
) -> list[str]:
    """The matrices that get adapters: those a pattern matches; without patterns, all in the decoder layers but the
    routed experts.

    Args:
        modules: names of all modules that are a matrix, or a stack of routed experts or an embedding.
        plan: shard plan of their family.
        patterns: `fnmatch` patterns, each for a module's whole name or its last words: "q_proj", "layers.0.mlp.*".
        key: the recipe key the patterns are from, for the message.

    Raises:
        UserError: a pattern matches no matrix.
    """
    known = [name for name in modules if not is_trained(f"{name}.weight")]
    if patterns is None:
        inside = f"{plan.layers}." if plan.layers else ""
        known = [name for name in known if not plan.is_expert(f"{name}.weight")]
        return [name for name in known if name.startswith(inside) and name != "lm_head"]
    chosen = set()
    for pattern in patterns:
        matching = [name for name in known if matches(name, pattern)]
        if not matching:
            ends = sorted({name.rpartition(".")[2] for name in known})
            shown = next((name for name in known if plan.layers and name.startswith(plan.layers)), known[0])
            raise UserError(
                f"{key}: {pattern!r} matches no matrix of the model; it has {', '.join(ends)}, "
                f"with whole names such as {shown}"
            )
        chosen.update(matching)
    return [name for name in known if name in chosen]


def matches(module: str, pattern: str) -> bool:
    """Whether a pattern is one for a module's whole name or its last words."""
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"*.{pattern}")


def adaptable_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that may have an adapter, by the shapes of all parameters: every matrix and stack of experts, and
    the embedding, unless it is tied."""
    found = set(linear_modules(shapes, plan)).union(expert_modules(shapes, plan))
    if has_own_head(shapes):
        found.add(plan.embedding)
    return [module for name in shapes if (module := name.removesuffix(".weight")) in found]


def has_own_head(parameters: Iterable[str]) -> bool:
    """Whether a model of these parameters has a head that is not its embedding."""
    return any(name in ("lm_head.weight", SCORE) for name in parameters)


def expert_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that are a stack of routed experts, by the shapes of all parameters."""
    return [name.removesuffix(".weight") for name in shapes if plan.is_expert(name) and name.endswith(".weight")]


def linear_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that are a matrix, judged by the shapes of all parameters: no embeddings, gates or experts."""
    found = [name.removesuffix(".weight") for name, s in shapes.items() if len(s) == 2 and name.endswith(".weight")]
    return [name for name in found if name not in plan.first and not fnmatch.fnmatchcase(name, plan.gates)]


def frozen_matrices(shapes: Mapping[str, Sequence[int]], plan: ShardPlan, trained: Collection[str]) -> frozenset[str]:
    """Names of the matrices of linear layers in the decoder layers that are not trained, by the shapes of all
    parameters."""
    names = (f"{module}.weight" for module in pick_modules(linear_modules(shapes, plan), plan, None))
    return frozenset(name for name in names if name not in trained)


def quantised_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The matrices that a quantised base stores so: all in the decoder layers and the stacks of routed experts, by the
    shapes of all parameters."""
    found = {*pick_modules(linear_modules(shapes, plan), plan, None), *expert_modules(shapes, plan)}
    return [module for name in shapes if (module := name.removesuffix(".weight")) in found]


def factor_shapes(method: str, rank: int, shape: Sequence[int], init: str = "default") -> dict[str, tuple[int, ...]]:
    """The parameters of an adapter, in the order of the layer.

    Args:
        method: that of `lora.method`.
        rank: of the adapter.
        shape: that of its matrix, [inputs, outputs], or of a stack, [experts, inputs, outputs].
        init: that of `lora.init`.
    """
    *stacked, num_inputs, num_outputs = shape
    if stacked:  # one of each for every matrix
        of_one = factor_shapes(method, rank, (num_inputs, num_outputs), init)
        return {kind: (*stacked, *size) for kind, size in of_one.items()}
    if method == "vera":
        pair = {START_FIRST: (num_inputs, rank), START_SECOND: (rank, num_outputs)}
        return {**pair, BETWEEN: (rank,), BEHIND: (num_outputs,)}
    if method == "mora":
        size = square_size(rank, num_inputs, num_outputs)
        return {SQUARE: (size, size)}
    if method == "lokr":
        return dict(kron_shapes(rank, num_inputs, num_outputs))
    found: dict[str, tuple[int, ...]] = {FIRST_FACTOR: (num_inputs, rank)}
    if method == "mixer":
        found[MIXER] = rank, rank
    found[SECOND_FACTOR] = rank, num_outputs
    if method == "dora":
        found[MAGNITUDE] = (num_outputs,)
    if init != "default":
        found |= {START_FIRST: found[FIRST_FACTOR], START_SECOND: found[SECOND_FACTOR]}
    return found


def with_adapters(
    shapes: Mapping[str, Sequence[int]], modules: Sequence[str], rank: int, method: str = "lora", init: str = "default"
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of the adapters on these modules."""
    result: dict[str, tuple[int, ...]] = {}
    adapted, factors = set(modules), {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        result[name] = tuple(shape)
        if module in adapted and name.endswith(".weight"):
            own = factor_shapes(method, rank, shape, init)
            factors[module] = {f"{module}.{kind}": of_kind for kind, of_kind in own.items()}
    for of_module in factors.values():
        result |= of_module
    return result


def is_trained(parameter: str) -> bool:
    """Whether a parameter of a model with adapters is trained: the adapters are, and a score head, as it is new."""
    return (is_factor(parameter) and not is_fixed(parameter)) or parameter == SCORE


def is_fixed(parameter: str) -> bool:
    """Whether a parameter of an adapter keeps the value it began with, and is saved with the others."""
    return parameter.rpartition(".")[2] in (START_FIRST, START_SECOND)


def is_factor(parameter: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return parameter.rpartition(".")[2] in FACTORS
