"""Full parameters and optimizer state of a checkpoint, whatever the sharding: saving and restoring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.adapters.parameters import is_fixed
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_dir import SavedAdapters
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.prefix_dir import Prefixes, open_prefixes
from llmsuite.checkpoint.reft_dir import Interventions, open_interventions
from llmsuite.checkpoint.save import GatheredTensor, assign_writers
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.contract.registry import Registry
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.weights import read_from
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.base_optimizer import BaseOptimizer, StateTensor
from llmsuite.parallel.block_layout import num_blocks
from llmsuite.parallel.materialize import read_local_values
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import CODE_OF_ZERO, has_block_moments, local_slice
from llmsuite.parallel.pipeline_split import owner_stage
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.vocabulary import pad_values, read_padded, without_padding
from llmsuite.recipe.plans import ModelPlan

CRITIC = "critic"
"""Stem of the files of a critic, which have its parameters and optimizer slots together."""


class FullModelState:
    """Full parameters and optimizer state for a checkpoint; each tensor is gathered when its writer writes it."""

    parameters: list[GatheredTensor]
    optimizer_state: list[GatheredTensor]
    """Optimizer slots, named `parameter/slot`."""

    def __init__(self, model_plan: ModelPlan, built: BuiltModel, optimizer: BaseOptimizer, dtype: str, mesh: Mesh):
        """
        Args:
            model_plan: plan of the model.
            built: the model.
            optimizer: optimizer of its shards.
            dtype: dtype of the parameters.
            mesh: coordinates of this rank.
        """
        shard_plan = model_plan.shard_plan
        shapes = built.shapes
        owners = {name: owner_stage(name, shard_plan, built.bounds, mesh.degrees.pp) for name in shapes}
        shards = [*optimizer.shards, *_fixed(built)]
        here = {shard.name: shard for shard in shards if owners[shard.name] == mesh.coordinate["pp"]}
        parameters = []
        for name, shape in shapes.items():
            parameter_dtype = "float32" if shard_plan.is_gate_bias(name) else dtype
            gather = _unpadded(here[name].gather_parameter, shape) if name in here else None
            parameters.append(GatheredTensor(name, shape, parameter_dtype, gather))
        if built.adapters is None:
            names = model_plan.family.names()
            together = {name: names.hf_tensors(name, model_plan.config).names for name in shapes}
            if built.carried is not None:
                parameters += [_from_file(built.carried, name, dtype) for name in built.carried.carried]
                owners = {**dict.fromkeys(built.carried.carried, mesh.degrees.pp - 1), **owners}
            self.parameters = []
            for tensor in _with_writers(parameters, owners, mesh, together):
                is_from_file = tensor.name not in shapes
                if is_from_file and tensor.writer != mesh.rank:  # only the writer reads it
                    tensor = dataclasses.replace(tensor, gather=None)
                self.parameters.append(tensor)
        else:  # adapters are written to one file by one rank
            self.parameters = [_on_every_stage(tensor, owners[tensor.name]) for tensor in parameters]
        self.optimizer_state = _optimizer_state(_trained(shapes), owners, optimizer, mesh)


def _trained(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the shapes of the parameters that the optimizer has."""
    return {name: shape for name, shape in shapes.items() if not is_fixed(name)}


def _fixed(built: BuiltModel) -> list[ParameterShard]:
    """Return the shards of parameters that are saved, but not trained."""
    return [shard for shard in built.every_shard if is_fixed(shard.name)]


def _unpadded(gather: Callable[[], Any], shape: Sequence[int]) -> Callable[[], Any]:
    """Wrap `gather` so that it removes the padding of the vocabulary."""
    return lambda: without_padding(gather(), shape)


def _from_file(source: ModelDirectory, name: str, dtype: str) -> GatheredTensor:
    """Make the entry of a tensor that no rank has in its model: its writer reads it from the source."""

    def read() -> Any:
        return tensor_of(source.read(name).astype("float32"), place=paddle.CPUPlace()).astype(dtype)

    return GatheredTensor(name, source.spec(name).shape, dtype, read)


def _optimizer_state(
    shapes: Mapping[str, Sequence[int]], owners: Mapping[str, int], optimizer: BaseOptimizer, mesh: Mesh
) -> list[GatheredTensor]:
    held = {entry.name: entry for entry in optimizer.state()}
    slots = []
    slot_owners = {}
    scalar_writers = {}
    for name, shape in shapes.items():
        is_of_blocks = has_block_moments(optimizer.kind, name, shape)
        for slot in optimizer.slots_of(name, shape):
            full_name = f"{name}/{slot}"
            is_scalar = StateTensor.slot_is_scalar(slot)
            gather = None
            if owners[name] == mesh.coordinate["pp"]:
                gather = _gather(held[full_name])
            slot_shape = shape
            if is_scalar:
                slot_shape = [1]
            elif StateTensor.slot_is_of_blocks(slot):
                slot_shape = [num_blocks(shape)]
            elif gather is not None:
                gather = _unpadded(gather, shape)
            dtype = "float32"  # of powers, scales and masters
            if slot in CODE_OF_ZERO:
                dtype = "int8" if is_of_blocks else optimizer.moment_dtype
            slots.append(GatheredTensor(full_name, slot_shape, dtype, gather))
            slot_owners[full_name] = owners[name]
            if is_scalar:  # stale on ranks without a shard of the parameter: the first rank of a stage has one
                scalar_writers[full_name] = int(mesh.grid[owners[name]].flat[0])
    return [
        dataclasses.replace(slot, writer=scalar_writers.get(slot.name, slot.writer))
        for slot in _with_writers(slots, slot_owners, mesh, {})
    ]


def _with_writers(
    tensors: Sequence[GatheredTensor], owners: Mapping[str, int], mesh: Mesh, together: Mapping[str, Sequence[str]]
) -> list[GatheredTensor]:
    """Assign the tensors of each pipeline stage to its ranks: one rank writes a tensor, all of the stage gather it."""
    writers: dict[str, int] = {}
    for stage, ranks in enumerate(mesh.grid):
        sizes = {tensor.name: tensor.num_bytes for tensor in tensors if owners[tensor.name] == stage}
        writers |= assign_writers(sizes, [int(rank) for rank in ranks.flat], together)
    return [dataclasses.replace(tensor, writer=writers[tensor.name]) for tensor in tensors]


def _on_every_stage(tensor: GatheredTensor, owner: int) -> GatheredTensor:
    gather = tensor.gather

    def gather_everywhere() -> Any:
        value = gather() if gather else None
        return collective.broadcast_from_stage(value, tensor.shape, tensor.dtype, owner)

    return dataclasses.replace(tensor, gather=gather_everywhere)


def _gather(entry: StateTensor) -> Callable[[], Any]:
    if entry.is_scalar:
        # Paddle keeps beta_pow accumulators on the host, whatever the device
        return lambda: entry.shard.gather_number(tensor_of(array_of(entry.value)))
    if entry.gather_blocks is not None:
        gather_blocks = entry.gather_blocks
        return lambda: gather_blocks(entry.value)
    return lambda: entry.shard.gather_shard(entry.on_device())


def restore(
    path: Path, model_plan: ModelPlan, registry: Registry, built: BuiltModel, optimizer: BaseOptimizer, mesh: Mesh
) -> None:
    """Load parameters and optimizer state of a checkpoint, whatever mesh it was written on; each rank reads its
    slices."""
    shard_plan = model_plan.shard_plan
    if isinstance(built.adapters, Interventions):
        values = read_from(open_interventions(path).files)
    elif isinstance(built.adapters, Prefixes):
        values = read_from(open_prefixes(path).trained(built.adapters.network))
    elif built.adapters is not None:
        values = read_from(SavedAdapters(path, built.adapters, model_plan.family, model_plan.config))
    else:
        saved = open_model(path, registry.models, mtp=num_mtp_layers(model_plan.config) > 0)
        check_shapes(saved, {name: tuple(shape) for name, shape in built.shapes.items()})
        values = read_from(saved)
    values = pad_values(values, built.shapes)
    for shard in (*optimizer.shards, *_fixed(built)):
        shard.load(read_local_values(shard.name, shard.shape, shard_plan, mesh, values))
    for shard in optimizer.shards:
        optimizer.to_host(shard)
    if not list(optimizer.state()):
        return
    files = TensorFiles(path, "optimizer")
    slots = {
        f"{name}/{slot}" for name, shape in _trained(built.shapes).items() for slot in optimizer.slots_of(name, shape)
    }
    if differing := sorted(slots.symmetric_difference(files.names)):
        raise UserError(f"{path}: its optimizer has other tensors than this one: {', '.join(differing)}")
    _restore_slots(files, shard_plan, built, optimizer, mesh)


def needed_tensors(model_plan: ModelPlan, built: BuiltModel, optimizer: BaseOptimizer) -> Callable[[str, str], bool]:
    """Return a predicate: True for a tensor of a checkpoint, given its file and its name, that `restore` reads on this
    rank."""
    names = model_plan.family.names()
    config = model_plan.config
    slots = {entry.name for entry in optimizer.state()}
    is_full_model = built.adapters is None
    own: set[str] = set()
    if is_full_model:
        for shard in (*optimizer.shards, *_fixed(built)):
            own.update(names.hf_tensors(shard.name, config).names)

    def needs(file: str, tensor: str) -> bool:
        if file.startswith("optimizer"):
            return tensor in slots
        if is_full_model and file.startswith("model"):
            return tensor in own
        return True  # adapters, which are small, or a critic

    return needs


def restore_from_stem(
    path: Path, stem: str, model_plan: ModelPlan, built: BuiltModel, optimizer: BaseOptimizer, mesh: Mesh
) -> None:
    """Load parameters and optimizer slots of a model from its own set of files in a checkpoint, named by `stem`."""
    shard_plan = model_plan.shard_plan
    files = TensorFiles(path, stem)
    slots = {f"{name}/{slot}" for name, shape in built.shapes.items() for slot in optimizer.slots_of(name, shape)}
    if differing := sorted({*built.shapes, *slots}.symmetric_difference(files.names)):
        raise UserError(f"{path}: its {stem} has other tensors than this one: {', '.join(differing)}")
    values = pad_values(lambda name, shape, index: files.read(name, index), built.shapes)
    for shard in optimizer.shards:
        shard.load(read_local_values(shard.name, shard.shape, shard_plan, mesh, values))
        optimizer.to_host(shard)
    _restore_slots(files, shard_plan, built, optimizer, mesh)


def _restore_slots(
    files: TensorFiles, shard_plan: ShardPlan, built: BuiltModel, optimizer: BaseOptimizer, mesh: Mesh
) -> None:
    def read(entry: StateTensor) -> np.ndarray:
        if entry.is_scalar or entry.gather_blocks is not None:
            return files.read(entry.name)
        shard = entry.shard
        shape = built.shapes[shard.name]
        index = local_slice(shard.name, shard.shape, shard_plan, mesh)
        padding = CODE_OF_ZERO[entry.slot] if files.spec(entry.name).dtype == "int8" else 0
        values = read_padded(lambda inside: files.read(entry.name, inside), shape, index, padding)
        if values.dtype.name == "bfloat16":  # no dtype of numpy's own, which Paddle takes; float32 has all its values
            values = values.astype("float32")
        return shard.own_shard(values)

    optimizer.load_state(read)
