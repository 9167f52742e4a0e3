"""Generation with pipeline stages: the layers of each stage, and a pass through all of them.

The stages compute a batch one after the other: pipelines are for models that do not fit on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.blocks import keeps_state
from llmsuite.models.head import is_tied
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline_split import keep_part, layer_costs, part_bounds


def stage_bounds(family: ModelFamily, config: Any, num_stages: int, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Bounds of the layers of each stage: stage s has the layers from bound s to bound s + 1. The largest stage is as
    small as possible.

    Args:
        family: of the model.
        config: its shape.
        num_stages: number of stages.
        shapes: of every parameter of the full model, by llmsuite's names.

    Raises:
        UserError: there are fewer layers than stages.
    """
    count = int(config.num_hidden_layers)
    plan = family.shard_plan or UNSHARDED
    if num_stages == 1:
        return [0, count]
    if plan is UNSHARDED:
        raise UserError(f"--pipeline_parallel_degree: family {family.name} has no shard plan; leave it out")
    if num_stages > count:
        raise UserError(
            f"--pipeline_parallel_degree: is {num_stages}, and the model has {count} layers; use at most that"
        )
    return part_bounds("parameters", layer_costs(shapes, plan, count, is_tied(config)), num_stages)


def keep_stage_layers(model: Any, family: ModelFamily, mesh: Mesh, shapes: Mapping[str, Sequence[int]]) -> None:
    """Remove from a lazily built model all layers that other stages have; `family` and `shapes` as for `stage_bounds`.

    Raises:
        UserError: the model has interventions or prefixes, too few layers, or a stage only linear attention.
    """
    if model.edited_ends is not None or model.num_prefix_tokens:
        raise UserError("--pipeline_parallel_degree: not with interventions (reft) or prefixes; leave it out")
    bounds = stage_bounds(family, model.config, mesh.degrees.pp, shapes)
    of_states = [keeps_state(layer) for layer in model.model.layers]
    for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
        if all(of_states[first:last]):
            raise UserError(
                f"--pipeline_parallel_degree: stage {stage} has layers {first} to {last - 1}, all with linear "
                "attention; each stage needs one with full attention: use fewer stages, or tensor parallelism"
            )
    keep_part(model, family.shard_plan or UNSHARDED, mesh.coordinate["pp"], bounds, is_tied(model.config))


def run_stages(
    mesh: Mesh, own: Callable[[Tensor | None], Tensor], hidden: Sequence[int], dtype: Any, last: Sequence[int]
) -> Tensor:
    """Run the stages one after the other; every rank calls it, and gets the output of the last stage.

    Args:
        mesh: this rank's coordinates.
        own: this rank's stage, called once: maps the output of the stage before, None for the first, to hidden states,
            or in the last stage to logits in float32.
        hidden: shape of hidden states.
        dtype: of hidden states.
        last: shape of logits.
    """
    mine = mesh.coordinate["pp"]
    end = mesh.degrees.pp - 1
    result: Tensor | None = None
    for stage in range(end):
        if stage == mine:
            result = own(result)
        # A broadcast over the pipeline, not a message to the next stage alone: Gloo matches messages by the number that
        # each of two ranks has sent and received before. For stages after this one a rank only takes part in the calls.
        sent = collective.broadcast_from_stage(result if stage == mine else None, hidden, dtype, stage)
        if stage == mine - 1:
            result = sent
    if mine == end:
        result = own(result)
    # every rank samples, so every rank needs the logits
    return collective.broadcast_from_stage(result if mine == end else None, last, "float32", end)
