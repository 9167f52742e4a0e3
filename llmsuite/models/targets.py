"""The modules that have a matrix, and those that patterns of a recipe choose among them. Imports no Paddle."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence

from llmsuite.base.errors import UserError
from llmsuite.models.head import OUTPUT, SCORE
from llmsuite.models.shard_plan import ShardPlan

HEAD = OUTPUT.removesuffix(".weight")
"""Name of the output projection of a model that is not tied."""


def pick_modules(
    modules: Sequence[str], plan: ShardPlan, patterns: Sequence[str] | None, key: str = "lora.target_modules"
) -> list[str]:
    """The matrices that get adapters: those that a pattern matches; without patterns, all in the decoder layers except
    routed experts.

    Args:
        modules: names of all modules that are a matrix, a stack of routed experts or an embedding.
        plan: shard plan of their family.
        patterns: `fnmatch` patterns of a module's full name or its last components: "q_proj", "layers.0.mlp.*".
        key: the recipe key of the patterns, for the message.

    Raises:
        UserError: a pattern matches no matrix.
    """
    known = [name for name in modules if f"{name}.weight" != SCORE]
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
                f"with full names such as {shown}"
            )
        chosen.update(matching)
    return [name for name in known if name in chosen]


def matches(module: str, pattern: str) -> bool:
    """True if a pattern matches a module's full name or its last components."""
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"*.{pattern}")


def full_modules(patterns: Sequence[str] | None, plan: ShardPlan, is_tied: bool) -> list[str]:
    """The modules that are trained in full next to adapters: those of embedding and head that a pattern matches.

    Args:
        patterns: `lora.modules_to_save`: full names or their last components.
        plan: shard plan of the family.
        is_tied: whether the head is the embedding.
    """
    found = {module for pattern in patterns or () for module in (plan.embedding, HEAD) if matches(module, pattern)}
    if is_tied and found:
        return [plan.embedding]
    return [module for module in (plan.embedding, HEAD) if module in found]


def adaptable_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that can have an adapter, from the shapes of all parameters: every matrix and stack of experts, and
    the embedding unless it is tied."""
    found = set(linear_modules(shapes, plan)).union(expert_modules(shapes, plan))
    if has_own_head(shapes):
        found.add(plan.embedding)
    return [module for name in shapes if (module := name.removesuffix(".weight")) in found]


def has_own_head(parameters: Iterable[str]) -> bool:
    """True if a model with these parameters has a head that is not its embedding."""
    return any(name in ("lm_head.weight", SCORE) for name in parameters)


def expert_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that are a stack of routed experts, from the shapes of all parameters."""
    return [name.removesuffix(".weight") for name in shapes if plan.is_expert(name) and name.endswith(".weight")]


def linear_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that are a matrix, from the shapes of all parameters: no embeddings, gates or experts."""
    found = [name.removesuffix(".weight") for name, s in shapes.items() if len(s) == 2 and name.endswith(".weight")]
    return [name for name in found if name not in plan.first and not fnmatch.fnmatchcase(name, plan.gates)]


def frozen_matrices(shapes: Mapping[str, Sequence[int]], plan: ShardPlan, trained: Collection[str]) -> frozenset[str]:
    """Names of the frozen matrices of linear layers in the decoder layers, from the shapes of all parameters."""
    names = (f"{module}.weight" for module in pick_modules(linear_modules(shapes, plan), plan, None))
    return frozenset(name for name in names if name not in trained)


def quantised_modules(shapes: Mapping[str, Sequence[int]], plan: ShardPlan) -> list[str]:
    """The modules that a quantised base model stores quantised: all matrices in the decoder layers and the stacks of
    routed experts, from the shapes of all parameters."""
    found = {*pick_modules(linear_modules(shapes, plan), plan, None), *expert_modules(shapes, plan)}
    return [module for name in shapes if (module := name.removesuffix(".weight")) in found]
