"""This rank's part of the model and of its optimizer: born from the seed or from files, saved and brought back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.checkpoint.train_state import WholeTensor
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.init import initial_values
from llmsuite.engine.mesh import Mesh
from llmsuite.engine.optimizer import Optimizer, StateTensor
from llmsuite.engine.parallelize import fill, own_slice, parallelize
from llmsuite.engine.sharding import ParameterShard
from llmsuite.models.shard_plan import WHOLE
from llmsuite.observe.progress import report
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan


def build_model(plan: RunPlan, registry: Registry, backend: DeviceBackend, mesh: Mesh) -> tuple[Any, str]:
    """The model with its initial weights, and a digest of all that decides their values."""
    engine, seed = plan.recipe.engine, plan.recipe.seed
    with paddle.LazyGuard():
        model = plan.family.factory()(plan.model_config, backend.ops(engine.precision))
    model.recompute = engine.recompute == "full"
    digest = hashlib.sha256(json.dumps([engine.precision, plan.model_config.to_hf()]).encode())
    if plan.weights is not None:
        source = open_model(plan.weights, registry.models)
        report(f"loading {plan.weights} ({source.layout} layout)")
        read = _read_from(source)
        digest.update(source.digest().encode())
    else:
        read = _draw(model, seed, plan.model_config.initializer_range)
        digest.update(f"seed {seed}".encode())
    dtype = backend.parameter_dtype(engine.precision)
    parallelize(model, plan.family.shard_plan or WHOLE, mesh, read, dtype, plan.recipe.parallel.sequence_parallel)
    count = sum(int(p.size) for p in model.parameters())
    report(f"{plan.family.name} with {count / 1e6:.1f}M parameters on {mesh.degrees.num_ranks} x {backend.name}")
    return model, digest.hexdigest()


def make_shards(plan: RunPlan, model: Any, mesh: Mesh) -> list[ParameterShard]:
    """What this rank's optimizer owns of each parameter."""
    cuts = plan.family.shard_plan or WHOLE
    stage = {"none": 0, "stage1": 1, "stage2": 2}[plan.recipe.parallel.sharding]
    return [ParameterShard(name, p, mesh, cuts.dim(name), stage) for name, p in model.named_parameters()]


def whole_parameters(shards: Sequence[ParameterShard]) -> list[WholeTensor]:
    """The parameters as a checkpoint has them."""
    return [WholeTensor(s.name, s.shape, s.parameter.dtype, s.gather_parameter) for s in shards]


def whole_state(optimizer: Optimizer) -> list[WholeTensor]:
    """The optimizer's state as a checkpoint has it."""
    return [_whole(entry) for entry in optimizer.state()]


def _whole(entry: StateTensor) -> WholeTensor:
    shard, value = entry.shard, entry.value
    if entry.is_scalar:
        return WholeTensor(entry.name, [1], paddle.float32, lambda: value)
    part = shard.empty_part() if value is None else value
    return WholeTensor(entry.name, shard.shape, paddle.float32, lambda: shard.gather_part(part))


def restore(path: Path, plan: RunPlan, registry: Registry, model: Any, optimizer: Optimizer, mesh: Mesh) -> None:
    """Load parameters and optimizer of a checkpoint, whatever mesh it was written on; each rank reads its slices."""
    cuts = plan.family.shard_plan or WHOLE
    fill(model, cuts, mesh, _read_from(open_model(path, registry.models)), "float32")
    for shard in optimizer.shards:
        shard.refresh()
    entries = list(optimizer.state())
    if not entries:
        return
    files = TensorFiles(path, "optimizer")

    def read(entry: StateTensor) -> np.ndarray:
        if entry.is_scalar:
            return files.read(entry.name)
        shard = entry.shard
        return shard.cut(files.read(entry.name, own_slice(shard.name, shard.shape, cuts, mesh)))

    optimizer.load_state(read)


def _read_from(source: ModelDirectory) -> Callable[[str, Sequence[int], Sequence[slice]], np.ndarray]:
    return lambda name, shape, index: source.read(name, index)


def _draw(model: Any, seed: int, std: float) -> Callable[[str, Sequence[int], Sequence[slice]], np.ndarray]:
    constants = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # gains and biases start as their layers say
            parameter.initialize()
            constants[name] = parameter.numpy()

    def read(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if name in constants:
            return constants[name][tuple(index)]
        return initial_values(seed, name, shape, std, index)

    return read
