"""Which matrices of a model get adapters, and which parameters are trained with them. Imports no Paddle."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from llmsuite.errors import UserError
from llmsuite.models.head import SCORE
from llmsuite.models.shard_plan import FACTORS, FIRST_FACTOR, MAGNITUDE, MIXER, SECOND_FACTOR, ShardPlan


def pick_modules(
    linear: Sequence[str], plan: ShardPlan, patterns: Sequence[str] | None, key: str = "lora.target_modules"
) -> list[str]:
    """The matrices that get adapters: those a pattern matches; without patterns, all in the decoder layers.

    Args:
        linear: names of all modules that are a matrix.
        plan: shard plan of their family.
        patterns: `fnmatch` patterns, each for a module's whole name or its last words: "q_proj", "layers.0.mlp.*".
        key: the recipe key the patterns are from, for the message.

    Raises:
        UserError: a pattern matches no matrix.
    """
    known = [name for name in linear if not is_trained(f"{name}.weight")]
    if patterns is None:
        inside = f"{plan.layers}." if plan.layers else ""
        return [name for name in known if name.startswith(inside) and name != "lm_head"]
    chosen = set()
    for pattern in patterns:
        matching = [n for n in known if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*.{pattern}")]
        if not matching:
            ends = sorted({name.rpartition(".")[2] for name in known})
            raise UserError(
                f"{key}: {pattern!r} matches no matrix of the model; it has {', '.join(ends)}, "
                f"with whole names such as {known[0]}"
            )
        chosen.update(matching)
    return [name for name in known if name in chosen]


def linear_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that are a matrix, judged by the shapes of all parameters: no embeddings, gates or experts."""
    found = [name.removesuffix(".weight") for name, s in shapes.items() if len(s) == 2 and name.endswith(".weight")]
    return [name for name in found if name not in plan.first and not fnmatch.fnmatchcase(name, plan.gates)]


def quantised_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The matrices that a quantised base stores so: all in the decoder layers but the routed experts, by the shapes of
    all parameters."""
    return pick_modules(linear_modules(shapes, plan), plan, None)


def factor_shapes(method: str, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
    """The parameters of an adapter on a matrix, in the order of the layer; `method` is that of `lora.method`."""
    found: dict[str, tuple[int, ...]] = {FIRST_FACTOR: (num_inputs, rank)}
    if method == "mixer":
        found[MIXER] = rank, rank
    found[SECOND_FACTOR] = rank, num_outputs
    if method == "dora":
        found[MAGNITUDE] = (num_outputs,)
    return found


def with_adapters(
    shapes: Mapping[str, Sequence[int]], modules: Sequence[str], rank: int, method: str = "lora"
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters and of the adapters on these modules."""
    result: dict[str, tuple[int, ...]] = {}
    adapted, factors = set(modules), {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        result[name] = tuple(shape)
        if module in adapted and name.endswith(".weight"):
            own = factor_shapes(method, rank, shape[0], shape[1])
            factors[module] = {f"{module}.{kind}": of_kind for kind, of_kind in own.items()}
    for of_module in factors.values():
        result |= of_module
    return result


def is_trained(parameter: str) -> bool:
    """Whether a parameter of a model with adapters is trained: the adapters are, and a score head, as it is new."""
    return is_factor(parameter) or parameter == SCORE


def is_factor(parameter: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return parameter.rpartition(".")[2] in FACTORS
