"""The modules whose parameters sharding stage 3 gathers at once. Plain data, without Paddle.

`gathering` executes this description, and the planner counts by it. A unit is gathered once in each forward pass that
runs its module, and once more in the backward pass, unless that needs no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.cut import layer_of

Place = Literal["front", "layers", "behind", "logits"]


class GatherUnit(NamedTuple):
    """Parameters that are whole while something computes with them."""

    place: Place
    """Where it runs: before the layers, one of them, behind them; or `logits`, which are made with a tied embedding."""
    module: str
    """Full name of the module; the embedding's for `logits`."""
    parameters: tuple[str, ...]
    """Full names, in the order of the model. Empty for a module without any."""
    in_backward: bool = True
    """Whether a backward pass needs the values: not that of a lookup."""

    def runs_in(self, part: int, num_parts: int) -> bool:
        """Whether a part of a pipeline runs it. A last part that has a tied embedding only makes logits with it."""
        if self.place == "front":
            return part == 0
        return self.place == "layers" or part == num_parts - 1


def gather_units(plan: ShardPlan, names: Sequence[str], is_tied: bool) -> list[GatherUnit]:
    """The units of a part of a model, in the order in which a forward pass runs them.

    Args:
        plan: the family's shard plan.
        names: full names of the parameters of the part.
        is_tied: whether logits are made with the weight of the embedding.
    """

    def unit(place: Place, module: str) -> GatherUnit:
        return GatherUnit(place, module, tuple(name for name in names if name.startswith(f"{module}.")))

    layers = sorted({layer for name in names if (layer := layer_of(name, plan)) is not None})
    units = [
        *(unit("front", module)._replace(in_backward=module != plan.embedding) for module in plan.first),
        *(unit("layers", f"{plan.layers}.{layer}") for layer in layers),
        *(unit("behind", module) for module in plan.last),
    ]
    tied = f"{plan.embedding}.weight"
    if is_tied and tied in names:
        units.append(GatherUnit("logits", plan.embedding, (tied,)))
    return units
