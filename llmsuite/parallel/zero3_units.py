"""The modules whose parameters sharding stage 3 (ZeRO-3) gathers together, and when. Plain data, without Paddle.

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
    is_lookup: bool
    """True for the embedding of tokens."""

    def num_runs(self, part: int, num_parts: int, num_mtp_layers: int) -> int:
        """Number of times that a forward pass through a part of a pipeline runs the module.

        A last part that has a tied embedding only makes logits with it, and looks up the next tokens once for each of
        its MTP layers (multi-token prediction).
        """
        is_last = part == num_parts - 1
        if self.position == "first":
            lookups = num_mtp_layers if self.is_lookup and is_last else 0
            return int(part == 0) + lookups
        return int(self.position == "layers" or is_last)

    def num_gathers(self, parameter: str, num_runs: int, is_trained: bool, with_backward: bool) -> int:
        """Number of times that a parameter of the unit is gathered in a forward pass, and the backward pass after it.

        Args:
            parameter: full name.
            num_runs: number of times that the forward pass runs the module.
            is_trained: False for a frozen parameter: no backward pass reaches a frozen module before the layers.
            with_backward: True where a backward pass follows.
        """
        is_passed_back = with_backward and (is_trained or self.position != "first")
        if is_passed_back and parameter in self.in_backward:
            return 2 * num_runs
        return num_runs


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
        in_backward = tuple(name for name in inside if name != table)
        return GatherUnit(position, module, inside, in_backward, is_lookup=module == plan.embedding)

    layers = sorted({layer for name in names if (layer := layer_of(name, plan)) is not None})
    units = [
        *(unit("first", module) for module in plan.first),
        *(unit("layers", f"{plan.layers}.{layer}") for layer in layers),
        *(unit("last", module) for module in plan.last),
    ]
    if is_tied and table in names:
        units.append(GatherUnit("logits", plan.embedding, (table,), (table,), is_lookup=False))
    return units


def layer_ahead(units: Sequence[GatherUnit], position: int, backward: bool = False) -> GatherUnit | None:
    """The layer whose parameters arrive while another one computes; None where no layer follows.

    The head does not arrive ahead: it computes for long enough by itself, and an allocator would keep a hole of its
    size among activations (Llama-3.1-8B with rows of 8,192 tokens, rehearsed: 4 GiB).

    Args:
        units: in the order of a forward pass.
        position: index of the unit that computes.
        backward: True for a backward pass, which needs the previous layer.
    """
    other = position - 1 if backward else position + 1
    if not 0 <= other < len(units):
        return None
    both = (units[position], units[other])
    return units[other] if all(unit.position == "layers" for unit in both) else None
