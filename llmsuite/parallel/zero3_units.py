"""The modules whose parameters sharding stage 3 (ZeRO-3) gathers together. Plain data, without Paddle.

`zero3` executes this description, and the planner counts by it. A unit is gathered once in each forward pass that runs
its module, and once more in the backward pass, unless that needs no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.pipeline_split import layer_of

Position = Literal["first", "layers", "last", "logits"]


class GatherUnit(NamedTuple):
    """Parameters that are gathered while one module computes with them."""

    position: Position
    """Position in the model: before the layers, one of them, or after them; or `logits`, made with a tied embedding."""
    module: str
    """Full name of the module; for `logits` that of the embedding."""
    parameters: tuple[str, ...]
    """Full names, in the order of the model. Empty for a module without parameters."""
    in_backward: tuple[str, ...]
    """Names of the parameters whose values a backward pass needs; that of a lookup is not among them."""

    def runs_in(self, part: int, num_parts: int) -> bool:
        """True where a part of a pipeline runs it. A last part that has a tied embedding only makes logits with it."""
        if self.position == "first":
            return part == 0
        return self.position == "layers" or part == num_parts - 1


def gather_units(plan: ShardPlan, names: Sequence[str], is_tied: bool) -> list[GatherUnit]:
    """The units of a part of a model, in the order in which a forward pass runs them.

    Args:
        plan: the family's shard plan.
        names: full names of the parameters of the part.
        is_tied: whether logits are made with the weight of the embedding.
    """

    table = f"{plan.embedding}.weight"

    def unit(position: Position, module: str) -> GatherUnit:
        inside = tuple(name for name in names if name.startswith(f"{module}."))
        return GatherUnit(position, module, inside, tuple(name for name in inside if name != table))

    layers = sorted({layer for name in names if (layer := layer_of(name, plan)) is not None})
    units = [
        *(unit("first", module) for module in plan.first),
        *(unit("layers", f"{plan.layers}.{layer}") for layer in layers),
        *(unit("last", module) for module in plan.last),
    ]
    if is_tied and table in names:
        units.append(GatherUnit("logits", plan.embedding, (table,), (table,)))
    return units
