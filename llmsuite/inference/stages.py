"""Models that answer from several pipeline stages: who has which layers, and how a pass goes through them.

Of one batch the stages compute one after the other: a pipeline is for models that one device has no room for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.errors import UserError
from llmsuite.models.head import is_tied
from llmsuite.models.shard_plan import WHOLE
from llmsuite.parallel import collective
from llmsuite.parallel.cut import keep_part, layer_costs, part_bounds
from llmsuite.parallel.mesh import Mesh
from llmsuite.specs import ModelFamily
from llmsuite.typing import Tensor


def stage_bounds(family: ModelFamily, config: Any, num_stages: int, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Stage s has the layers from bound s to bound s + 1: the largest stage is as small as it can be.

    Args:
        family: of the model.
        config: its shape.
        num_stages: how many.
        shapes: of every parameter of the whole model, by our names.

    Raises:
        UserError: there are fewer layers than stages.
    """
    count, plan = int(config.num_hidden_layers), family.shard_plan or WHOLE
    if num_stages == 1:
        return [0, count]
    if plan is WHOLE:
        raise UserError(f"--pipeline_parallel_degree: family {family.name} has no shard plan; leave it out")
    if num_stages > count:
        raise UserError(
            f"--pipeline_parallel_degree: is {num_stages}, and the model has {count} layers; use at most that"
        )
    return part_bounds("parameters", layer_costs(shapes, plan, count, is_tied(config)), num_stages)


def keep_stage(model: Any, family: ModelFamily, mesh: Mesh, shapes: Mapping[str, Sequence[int]]) -> None:
    """Leave in a lazily built model what the stage of a rank has; `family` and `shapes` as for `stage_bounds`.

    Raises:
        UserError: something runs beside the model, or it has too few layers.
    """
    if hasattr(model, "edited_ends") or hasattr(model, "num_prefix_tokens"):
        raise UserError("--pipeline_parallel_degree: not with interventions (reft) or prefixes; leave it out")
    bounds = stage_bounds(family, model.config, mesh.degrees.pp, shapes)
    keep_part(model, family.shard_plan or WHOLE, mesh.coordinate["pp"], bounds, is_tied(model.config))


def through_stages(
    mesh: Mesh, own: Callable[[Tensor | None], Tensor], hidden: Sequence[int], dtype: Any, last: Sequence[int]
) -> Tensor:
    """Let each stage compute in its turn; every rank calls it, and gets what the last stage gives.

    What a stage gives is sent to all of its pipeline, not to the next stage alone: Gloo matches messages by how many
    each of two ranks has sent and received before.

    Args:
        mesh: this rank's place.
        own: what this rank's stage makes of what the stage before gave, None for the first: hidden states, or in the
            last stage logits in float32. Called once.
        hidden: shape of hidden states.
        dtype: of hidden states.
        last: shape of logits.
    """
    mine, end = mesh.coordinate["pp"], mesh.degrees.pp - 1
    result: Tensor | None = None
    for stage in range(end):
        if stage == mine:
            result = own(result)
        # of stages behind this one a rank only takes part in the calls
        sent = collective.from_stage(result if stage == mine else None, hidden, dtype, stage)
        if stage == mine - 1:
            result = sent
    if mine == end:
        result = own(result)
    return collective.from_stage(result if mine == end else None, last, "float32", end)
