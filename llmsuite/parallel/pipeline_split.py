"""Split of the layers over a pipeline, and the modules of a model that belong to each part.

There are as many parts as stages, or a multiple of that with the interleaved schedule; part p is on stage p % stages.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.adapters.prefix_shapes import is_shared_by_all_ranks
from llmsuite.models.shard_plan import ShardPlan


def part_bounds(cut: str | Sequence[int], costs: Sequence[int], num_parts: int) -> list[int]:
    """Bounds of the parts: part p has the layers from bound p to bound p + 1.

    Args:
        cut: "layers" for the same number of layers in each part, with one more in the first parts; "parameters" for the
            smallest possible largest part; or the layers that parts 1, 2 ... start with.
        costs: cost of each layer, see `layer_costs`.
        num_parts: at most as many as there are layers.
    """
    if cut == "parameters":
        return _balanced(costs, num_parts)
    if cut == "layers":
        size, more = divmod(len(costs), num_parts)
        return [part * size + min(part, more) for part in range(num_parts + 1)]
    bounds = [0, *map(int, cut), len(costs)]
    assert len(bounds) == num_parts + 1, (cut, num_parts)
    return bounds


def layer_costs(shapes: Mapping[str, Sequence[int]], plan: ShardPlan, num_layers: int, tied: bool) -> list[int]:
    """Number of parameters of each layer. Modules before the layers count for the first layer, modules after them for
    the last; parameters that every part has are not counted.

    Args:
        shapes: shape of every parameter of the full model.
        plan: the family's shard plan.
        num_layers: number of layers of the model.
        tied: whether the last part needs a copy of the embedding.
    """
    costs = [0] * num_layers
    for name, shape in shapes.items():
        if is_shared_by_all_ranks(name):
            continue
        size = int(np.prod(shape, dtype="int64"))
        layer = layer_of(name, plan)
        if layer is None:
            layer = 0 if _is_before_layers(name, plan) else num_layers - 1
            if tied and _is_embedding(name, plan):
                costs[-1] += size
        costs[layer] += size
    return costs


def _balanced(costs: Sequence[int], num_parts: int) -> list[int]:
    """The bounds whose largest part is smallest; of those, the ones with the smallest sum of squares."""
    total = [0, *itertools.accumulate(costs)]
    # best[end]: (largest part, sum of squares, bounds) of the layers before `end` in the parts so far
    best: list[tuple[int, int, list[int]] | None] = [(0, 0, [0])] + [None] * len(costs)
    for _ in range(num_parts):
        longer: list[tuple[int, int, list[int]] | None] = [None] * len(best)
        for end in range(1, len(best)):
            found = []
            for start, before in enumerate(best[:end]):
                if before is not None:
                    part = total[end] - total[start]
                    found.append((max(before[0], part), before[1] + part * part, [*before[2], end]))
            longer[end] = min(found, default=None)
        best = longer
    assert best[-1] is not None, "more parts than layers"
    return best[-1][2]


def keep_part(model: Any, plan: ShardPlan, part: int, bounds: Sequence[int], tied: bool) -> None:
    """Remove the modules of all other parts.

    Args:
        model: lazily built, with all parts.
        plan: the family's shard plan.
        part: the part that is kept.
        bounds: see `part_bounds`.
        tied: whether the last part needs the embedding too.
    """
    last = len(bounds) - 2
    modules = dict(model.named_sublayers())
    layers = modules[plan.layers]
    for i in range(len(layers)):
        if not bounds[part] <= i < bounds[part + 1]:
            del layers._sub_layers[str(i)]
    removed = []
    if part != 0:
        keeps_embedding = tied and part == last
        removed += [name for name in plan.first if not (keeps_embedding and name == plan.embedding)]
    if part != last:
        removed += plan.last
    for name in removed:
        owner, _, attribute = name.rpartition(".")
        if name in modules:
            setattr(modules[owner] if owner else model, attribute, None)


def parts_with(
    parameter: str, plan: ShardPlan, bounds: Sequence[int], tied: bool, num_stages: int | None = None
) -> list[int]:
    """The parts that have a parameter after `keep_part`: one part; for a tied embedding the first and the last; for
    parameters that all layers share the first part of every stage.

    Args:
        parameter: its name.
        plan: the family's shard plan.
        bounds: see `part_bounds`.
        tied: whether the last part needs the embedding too.
        num_stages: of the pipeline; the number of parts if not given.
    """
    last = len(bounds) - 2
    if is_shared_by_all_ranks(parameter):
        return list(range(num_stages or last + 1))
    layer = layer_of(parameter, plan)
    if layer is not None:
        return [bisect.bisect_right(bounds, layer) - 1]
    if _is_before_layers(parameter, plan):
        return sorted({0, last}) if tied and _is_embedding(parameter, plan) else [0]
    return [last]


def owner_stage(parameter: str, plan: ShardPlan, bounds: Sequence[int], num_stages: int) -> int:
    """The pipeline stage that has a parameter; the first one of a tied parameter."""
    return parts_with(parameter, plan, bounds, tied=False)[0] % num_stages


def layer_of(parameter: str, plan: ShardPlan) -> int | None:
    """Number of the layer that a parameter belongs to; None before the layers and after them."""
    if not parameter.startswith(f"{plan.layers}."):
        return None
    return int(parameter.removeprefix(f"{plan.layers}.").split(".")[0])


def _is_before_layers(parameter: str, plan: ShardPlan) -> bool:
    return any(parameter.startswith(f"{module}.") for module in plan.first)


def _is_embedding(parameter: str, plan: ShardPlan) -> bool:
    return parameter.startswith(f"{plan.embedding}.")
