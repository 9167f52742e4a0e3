"""Builds models that place their parameters themselves, see `parallel.annotated`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import paddle

from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.files import check_whole
from llmsuite.parallel import collective
from llmsuite.parallel.annotated import AnnotatedModel, AnnotatedShard
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.vocabulary import network_of
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.build import BuiltModel, report_size


def build_annotated(plan: RunPlan, registry: Registry, backend: DeviceBackend, mesh: Mesh) -> BuiltModel:
    """Build the model, with its initial weights where it has placed them.

    Its layers draw them, from the seed of the recipe: on every rank the same numbers in the same order, whatever the
    meshes are, of which a rank keeps what it holds. So it has the memory for one whole parameter more.

    Raises:
        UserError: the model has something that cannot be saved, or other parameters than its family says.
    """
    recipe, config = plan.recipe, plan.model_config
    paddle.seed(recipe.seed)
    model = network_of(plan.family)(config, backend.ops(recipe.engine.precision))
    _check(plan, model)
    shards = [AnnotatedShard(name, parameter, mesh) for name, parameter in model.named_parameters()]
    shapes = {shard.name: list(shard.shape) for shard in shards}
    trained = [shard for shard in shards if not shard.parameter.stop_gradient]
    digest = hashlib.sha256(json.dumps([recipe.engine.precision, config.to_hf()], sort_keys=True).encode())
    if plan.weights is None:
        digest.update(f"the layers' own initializers, seed {recipe.seed}".encode())
    else:
        source = open_model(plan.weights, registry.models, load=recipe.model.load)
        if collective.rank() == 0:  # every byte once
            check_whole(plan.weights)
        report(f"loading {plan.weights} ({source.description})")
        _load(source, shards)
        digest.update(source.digest().encode())
    report_size(plan, backend, shapes, {shard.name: shard.shape for shard in trained})
    saved = {shard.name: shapes[shard.name] for shard in trained}
    return BuiltModel(
        AnnotatedModel(model, mesh), list(trained), saved, list(shards), shapes, [0, 1], digest.hexdigest(),
        None, None, [], None, None, None,
    )  # fmt: skip


def _check(plan: RunPlan, model: Any) -> None:
    """Raise UserError for a model that could not be saved and restored."""
    family, found = plan.family, [name for name, _ in model.named_parameters()]
    named = list(family.names().parameter_names(plan.model_config))
    if found != named:
        raise UserError(
            f"model.family: {family.name} says that its parameters are {', '.join(named)}, and its model has "
            f"{', '.join(found)}; `parameter_names` has to give those, in their order"
        )
    if frozen := [name for name, parameter in model.named_parameters() if parameter.stop_gradient]:
        raise UserError(f"model.family: {family.name} has parameters that are not trained: {', '.join(frozen)}")
    if kept := sorted(model.state_dict().keys() - {*found}):
        raise UserError(
            f"model.family: {family.name} has buffers, which checkpoints of models with meshes of their own lack: "
            f"{', '.join(kept)}; register them with persistable=False, and compute them in the constructor"
        )


def _load(source: ModelDirectory, shards: list[AnnotatedShard]) -> None:
    check_shapes(source, {shard.name: tuple(shard.shape) for shard in shards})
    for shard in shards:
        shard.load(source.read(shard.name))
