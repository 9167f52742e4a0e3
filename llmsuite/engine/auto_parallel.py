"""Construction of models that place their parameters themselves, see `parallel.auto_parallel`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.files import check_intact
from llmsuite.base.progress import report
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.contract.registry import Registry
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.build import BuiltModel, report_size
from llmsuite.parallel import collective
from llmsuite.parallel.auto_parallel import AutoParallelModel, AutoParallelShard
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.vocabulary import network_of
from llmsuite.recipe.plans import ModelPlan, ParallelPlan


def build_auto_parallel(
    model_plan: ModelPlan, parallel_plan: ParallelPlan, registry: Registry, backend: DeviceBackend, mesh: Mesh
) -> BuiltModel:
    """Build the model, with its initial weights on the placements that it declares.

    The layers sample them from the seed of the recipe: every rank makes the same numbers in the same order, whatever
    the meshes are, and keeps its shard. So a rank needs memory for one more full parameter.

    Raises:
        UserError: the model has state that cannot be saved, or other parameters than its family lists.
    """
    config = model_plan.config
    precision = parallel_plan.engine.precision
    paddle.seed(model_plan.seed)
    model = network_of(model_plan.family)(config, backend.ops(precision))
    _check(model_plan, model)
    shards = [AutoParallelShard(name, parameter, mesh) for name, parameter in model.named_parameters()]
    shapes = {shard.name: list(shard.shape) for shard in shards}
    trained = [shard for shard in shards if not shard.parameter.stop_gradient]
    digest = hashlib.sha256(json.dumps([precision, config.to_hf()], sort_keys=True).encode())
    if model_plan.weights is None:
        digest.update(f"the layers' own initializers, seed {model_plan.seed}".encode())
    else:
        source = open_model(model_plan.weights, registry.models, load=model_plan.section.load)
        if collective.rank() == 0:  # one rank hashes the files: each byte is read once
            check_intact(model_plan.weights)
        report(f"loading {model_plan.weights} ({source.description})")
        _load(source, shards)
        digest.update(source.digest().encode())
    report_size(model_plan, parallel_plan, backend, shapes, {shard.name: shard.shape for shard in trained})
    saved = {shard.name: shapes[shard.name] for shard in trained}
    return BuiltModel(
        AutoParallelModel(model, mesh), list(trained), saved, list(shards), shapes,
        model_plan.family.names().is_linear, [0, 1], digest.hexdigest(), None, None, [], None, None, None,
    )  # fmt: skip


def _check(model_plan: ModelPlan, model: Any) -> None:
    """Raise UserError for a model that could not be saved and restored."""
    family = model_plan.family
    actual = [name for name, _ in model.named_parameters()]
    declared = list(family.names().parameter_names(model_plan.config))
    if actual != declared:
        raise UserError(
            f"model.family: {family.name} says that its parameters are {', '.join(declared)}, and its model has "
            f"{', '.join(actual)}; `parameter_names` has to list those, in their order"
        )
    if frozen := [name for name, parameter in model.named_parameters() if parameter.stop_gradient]:
        raise UserError(f"model.family: {family.name} has parameters that are not trained: {', '.join(frozen)}")
    if buffers := sorted(model.state_dict().keys() - {*actual}):
        raise UserError(
            f"model.family: {family.name} has buffers, which checkpoints of models with meshes of their own lack: "
            f"{', '.join(buffers)}; register them with persistable=False, and compute them in the constructor"
        )


def _load(source: ModelDirectory, shards: list[AutoParallelShard]) -> None:
    check_shapes(source, {shard.name: tuple(shard.shape) for shard in shards})
    for shard in shards:
        shard.load(source.read(shard.name))
