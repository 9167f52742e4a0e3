"""Parameters and optimizer as a checkpoint has them: whole tensors, whatever rank holds them; saved and restored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.checkpoint.adapter_dir import SavedAdapters
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.prefix_dir import Prefixes, open_prefixes
from llmsuite.checkpoint.reft_dir import Interventions, open_interventions
from llmsuite.checkpoint.save import GatheredTensor, assign_writers
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.errors import UserError
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.shard_plan import WHOLE, ShardPlan
from llmsuite.models.targets import is_fixed
from llmsuite.parallel import collective
from llmsuite.parallel.cut import owner_stage
from llmsuite.parallel.fill import read_local
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import SavedOptimizer, StateTensor
from llmsuite.parallel.partition import local_slice
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.vocabulary import pad_values, read_padded, without_padding
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.build import BuiltModel
from llmsuite.train.weights import read_from

CRITIC = "critic"
"""Stem of the files of a critic, which has its parameters and the slots of its optimizer in one set."""


class WholeModel:
    """Parameters and optimizer state to be saved; each tensor is gathered when its writer comes to it."""

    parameters: list[GatheredTensor]
    state: list[GatheredTensor]
    """The optimizer's, by `parameter/slot`."""

    def __init__(self, plan: RunPlan, built: BuiltModel, optimizer: SavedOptimizer, dtype: str, mesh: Mesh):
        """
        Args:
            plan: of the run.
            built: the model.
            optimizer: over its shards.
            dtype: dtype of the parameters.
            mesh: this rank's place.
        """
        shard_plan, shapes = plan.family.shard_plan or WHOLE, built.shapes
        owners = {name: owner_stage(name, shard_plan, built.bounds, mesh.degrees.pp) for name in shapes}
        shards = [*optimizer.shards, *_fixed(built)]
        here = {shard.name: shard for shard in shards if owners[shard.name] == mesh.coordinate["pp"]}
        parameters = []
        for name, shape in shapes.items():
            of_parameter = "float32" if shard_plan.is_gate_bias(name) else dtype
            gather = _cut(here[name].gather_parameter, shape) if name in here else None
            parameters.append(GatheredTensor(name, shape, of_parameter, gather))
        if built.adapters is None:
            names = plan.family.names()
            together = {name: names.hf_tensors(name, plan.model_config).names for name in shapes}
            if built.carried is not None:
                parameters += [_from_file(built.carried, name, dtype) for name in built.carried.carried]
                owners = {**dict.fromkeys(built.carried.carried, mesh.degrees.pp - 1), **owners}
            self.parameters = [
                dataclasses.replace(tensor, gather=None)
                if tensor.name not in shapes and tensor.writer != mesh.rank
                else tensor
                for tensor in _with_writers(parameters, owners, mesh, together)
            ]
        else:  # they go into one file
            self.parameters = [_on_every_stage(tensor, owners[tensor.name]) for tensor in parameters]
        self.state = _optimizer_state(_trained(shapes), owners, optimizer, mesh)


def _trained(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Those that the optimizer has."""
    return {name: shape for name, shape in shapes.items() if not is_fixed(name)}


def _fixed(built: BuiltModel) -> list[ParameterShard]:
    """Those that are saved, and not trained."""
    return [shard for shard in built.every_shard if is_fixed(shard.name)]


def _cut(gather: Callable[[], Any], shape: Sequence[int]) -> Callable[[], Any]:
    """The same without what is padding."""
    return lambda: without_padding(gather(), shape)


def _from_file(source: ModelDirectory, name: str, dtype: str) -> GatheredTensor:
    """A tensor that no rank has in its model: its writer reads it."""

    def read() -> Any:
        return paddle.to_tensor(source.read(name).astype("float32"), place=paddle.CPUPlace()).astype(dtype)

    return GatheredTensor(name, source.spec(name).shape, dtype, read)


def _optimizer_state(
    shapes: Mapping[str, Sequence[int]], owners: Mapping[str, int], optimizer: SavedOptimizer, mesh: Mesh
) -> list[GatheredTensor]:
    held = {entry.name: entry for entry in optimizer.state()}
    slots, slot_owners, scalar_writers = [], {}, {}
    for name, shape in shapes.items():
        for slot in optimizer.slots:
            full_name, is_scalar = f"{name}/{slot}", StateTensor.slot_is_scalar(slot)
            gather = _gather(held[full_name]) if owners[name] == mesh.coordinate["pp"] else None
            if gather is not None and not is_scalar:
                gather = _cut(gather, shape)
            slots.append(GatheredTensor(full_name, [1] if is_scalar else shape, "float32", gather))
            slot_owners[full_name] = owners[name]
            if is_scalar:  # not up to date where a rank owns nothing of the parameter: the first one owns some
                scalar_writers[full_name] = int(mesh.grid[owners[name]].flat[0])
    return [
        dataclasses.replace(slot, writer=scalar_writers.get(slot.name, slot.writer))
        for slot in _with_writers(slots, slot_owners, mesh, {})
    ]


def _with_writers(
    tensors: Sequence[GatheredTensor], owners: Mapping[str, int], mesh: Mesh, together: Mapping[str, Sequence[str]]
) -> list[GatheredTensor]:
    """Share the tensors of each pipeline stage among its ranks: one writes a tensor, all of the stage gather it."""
    writers: dict[str, int] = {}
    for stage, ranks in enumerate(mesh.grid):
        sizes = {tensor.name: tensor.num_bytes for tensor in tensors if owners[tensor.name] == stage}
        writers |= assign_writers(sizes, [int(rank) for rank in ranks.flat], together)
    return [dataclasses.replace(tensor, writer=writers[tensor.name]) for tensor in tensors]


def _on_every_stage(tensor: GatheredTensor, owner: int) -> GatheredTensor:
    gather = tensor.gather

    def gather_everywhere() -> Any:
        return collective.from_stage(gather() if gather else None, tensor.shape, tensor.dtype, owner)

    return dataclasses.replace(tensor, gather=gather_everywhere)


def _gather(entry: StateTensor) -> Callable[[], Any]:
    if entry.is_scalar:
        # Paddle keeps these on the host, whatever the device
        return lambda: entry.shard.gather_number(paddle.to_tensor(entry.value.numpy()))
    return lambda: entry.shard.gather_shard(entry.on_device())


def restore(
    path: Path, plan: RunPlan, registry: Registry, built: BuiltModel, optimizer: SavedOptimizer, mesh: Mesh
) -> None:
    """Load parameters and optimizer of a checkpoint, whatever mesh it was written on; each rank reads its slices."""
    shard_plan = plan.family.shard_plan or WHOLE
    if isinstance(built.adapters, Interventions):
        values = read_from(open_interventions(path).files)
    elif isinstance(built.adapters, Prefixes):
        values = read_from(open_prefixes(path).trained(built.adapters.network))
    elif built.adapters is not None:
        values = read_from(SavedAdapters(path, built.adapters, plan.family, plan.model_config))
    else:
        saved = open_model(path, registry.models, mtp=num_mtp_layers(plan.model_config) > 0)
        check_shapes(saved, {name: tuple(shape) for name, shape in built.shapes.items()})
        values = read_from(saved)
    values = pad_values(values, built.shapes)
    for shard in (*optimizer.shards, *_fixed(built)):
        shard.load(read_local(shard.name, shard.shape, shard_plan, mesh, values))
    for shard in optimizer.shards:
        optimizer.to_host(shard)
    if not list(optimizer.state()):
        return
    files = TensorFiles(path, "optimizer")
    slots = {f"{name}/{slot}" for name in _trained(built.shapes) for slot in optimizer.slots}
    if differing := sorted(slots.symmetric_difference(files.names)):
        raise UserError(f"{path}: its optimizer has other tensors than this one: {', '.join(differing)}")
    _restore_slots(files, shard_plan, built, optimizer, mesh)


def wanted_tensors(plan: RunPlan, built: BuiltModel, optimizer: SavedOptimizer) -> Callable[[str, str], bool]:
    """Whether `restore` reads a tensor of a checkpoint on this rank, by its file and its name there."""
    names, config = plan.family.names(), plan.model_config
    slots, whole = {entry.name for entry in optimizer.state()}, built.adapters is None
    held = (shard.name for shard in (*optimizer.shards, *_fixed(built)))
    own = {theirs for name in held for theirs in names.hf_tensors(name, config).names} if whole else set()

    def wants(file: str, tensor: str) -> bool:
        if file.startswith("optimizer"):
            return tensor in slots
        return tensor in own if whole and file.startswith("model") else True  # small, or of a critic

    return wants


def restore_whole(
    path: Path, stem: str, plan: RunPlan, built: BuiltModel, optimizer: SavedOptimizer, mesh: Mesh
) -> None:
    """The same for a model that has its own set of files in a checkpoint, with parameters and slots."""
    shard_plan, files = plan.family.shard_plan or WHOLE, TensorFiles(path, stem)
    slots = {f"{name}/{slot}" for name in built.shapes for slot in optimizer.slots}
    if differing := sorted({*built.shapes, *slots}.symmetric_difference(files.names)):
        raise UserError(f"{path}: its {stem} has other tensors than this one: {', '.join(differing)}")
    values = pad_values(lambda name, shape, index: files.read(name, index), built.shapes)
    for shard in optimizer.shards:
        shard.load(read_local(shard.name, shard.shape, shard_plan, mesh, values))
        optimizer.to_host(shard)
    _restore_slots(files, shard_plan, built, optimizer, mesh)


def _restore_slots(
    files: TensorFiles, shard_plan: ShardPlan, built: BuiltModel, optimizer: SavedOptimizer, mesh: Mesh
) -> None:
    def read(entry: StateTensor) -> np.ndarray:
        if entry.is_scalar:
            return files.read(entry.name)
        shard = entry.shard
        index = local_slice(shard.name, shard.shape, shard_plan, mesh)
        return shard.own_shard(
            read_padded(lambda inside: files.read(entry.name, inside), built.shapes[shard.name], index)
        )

    optimizer.load_state(read)
