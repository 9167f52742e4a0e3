"""This rank's part of the model and of its optimizer: born from the seed or from files, saved and brought back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.checkpoint.adapter_dir import Adapters, Base, SavedAdapters
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.shapes import check_shapes, skipped_tensors
from llmsuite.checkpoint.share import assign
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.checkpoint.train_state import GatheredTensor
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.models.head import SCORE, is_tied
from llmsuite.models.lora import adapted_modules, add_adapters
from llmsuite.models.qat import fake_quantize_layers
from llmsuite.models.shard_plan import FIRST_FACTOR, SECOND_FACTOR, WHOLE
from llmsuite.models.targets import is_factor, is_trained
from llmsuite.parallel import collective
from llmsuite.parallel.balance import ExpertBalance
from llmsuite.parallel.buckets import assign_buckets
from llmsuite.parallel.cut import keep_part, layer_costs, owner_stage, part_bounds
from llmsuite.parallel.gathering import Zero3Hooks
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer, StateTensor
from llmsuite.parallel.overlap import overlap_sums
from llmsuite.parallel.parallelize import ReadSlice, between_layers, parallelize, read_local
from llmsuite.parallel.partition import SHARDING_STAGES, local_slice
from llmsuite.parallel.pipeline import P2PChannels, PipelineStage
from llmsuite.parallel.quantisation import InputScales
from llmsuite.parallel.recompute import recompute_attention, recompute_layers
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.static import compile_layers
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.initial_values import initial_values


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """What `build_model` gives."""

    part: PipelineStage
    """This rank's part."""
    shards: list[ParameterShard]
    """What this rank's optimizer owns of each of its parameters; of adapters where there are any."""
    shapes: dict[str, list[int]]
    """Shape of every parameter that is saved, in the order of the layers: of the whole model, or of its adapters."""
    bounds: list[int]
    """Where the pipeline cuts the layers, see `part_bounds`."""
    digest: str
    """Changes with anything that decides the initial values; adapters change none, as they begin at zero."""
    adapters: Adapters | None
    """What there is to know of the adapters, where those are trained."""
    balance: ExpertBalance | None
    """Of the experts, where the family has some."""
    rounded: list[str]
    """Names of the fake-quantised layers of the whole model, in order."""
    input_scales: InputScales | None
    """Of those, where their inputs are rounded too."""


def build_model(plan: RunPlan, registry: Registry, backend: DeviceBackend, mesh: Mesh) -> BuiltModel:
    """This rank's part of the model with its initial weights."""
    engine, seed, cuts = plan.recipe.engine, plan.recipe.seed, plan.family.shard_plan or WHOLE
    lora, qat = plan.recipe.lora, plan.recipe.qat
    adapted: list[str] = []
    rounded: list[str] = []
    ratio, moving_rate = lora.lora_plus_ratio, qat.moving_rate
    chunks = []
    for _ in range(plan.num_chunks):
        with paddle.LazyGuard():
            model = plan.family.factory()(plan.model_config, backend.ops(engine.precision))
            if lora.rank is not None:
                adapted = adapted_modules(model, cuts, lora.target_modules)
                add_adapters(model, adapted, lora.rank, lora.scale)
            if qat.weight_bits is not None:
                rounded = adapted_modules(model, cuts, qat.target_modules, "qat.target_modules")
                fake_quantize_layers(model, rounded, rounds_weight=True)
            chunks.append(model)
    shapes = {name: list(p.shape) for name, p in chunks[0].named_parameters()}
    trained = {name: shape for name, shape in shapes.items() if lora.rank is None or is_trained(name)}
    count, num_trained = (sum(math.prod(shape) for shape in of.values()) for of in (shapes, trained))
    bounds, pp = [0, plan.model_config.num_hidden_layers], mesh.degrees.pp
    if pp > 1:
        tied = is_tied(plan.model_config)
        costs = layer_costs(shapes, cuts, bounds[-1], tied)
        bounds = part_bounds(plan.recipe.parallel.pipeline_cut, costs, pp * plan.num_chunks)
        for number, chunk in enumerate(chunks):
            keep_part(chunk, cuts, number * pp + mesh.coordinate["pp"], bounds, tied)
    digest = hashlib.sha256(json.dumps([engine.precision, plan.model_config.to_hf()]).encode())
    if plan.weights is not None:
        load = plan.recipe.model.load
        source = open_model(plan.weights, registry.models, load=load)
        report(f"loading {plan.weights} ({source.description})")
        base = Base(str(plan.weights.resolve()), source.digest())
        read = _read_from(source)
        digest.update(base.digest.encode())
        is_new = {name for name in shapes if is_factor(name) or (name == SCORE and SCORE not in source.names)}
        stored = {name: tuple(shape) for name, shape in shapes.items() if name not in is_new}
        if drawn := skipped_tensors(source, stored, load, report):
            read = _first_of(drawn, draw(chunks, seed, plan.model_config.initializer_range), read)
            digest.update(json.dumps(["drawn", seed, sorted(drawn)]).encode())
        if SCORE in is_new:
            report(f"{SCORE} is new, drawn from seed {seed}: {plan.weights} is a language model")
            read = _with_new_head(read, seed, plan.model_config.initializer_range)
            digest.update(f"score of seed {seed}".encode())
    else:
        read = draw(chunks, seed, plan.model_config.initializer_range)
        digest.update(f"seed {seed}".encode())
        base = Base(None, digest.copy().hexdigest())
    adapters = None
    if lora.rank is not None:
        read = _with_factors(read, seed)
        beside = [name for name in trained if not is_factor(name)]
        adapters = Adapters(adapted, lora.rank, lora.alpha, lora.rslora, base, beside)
    dtype = backend.parameter_dtype(engine.precision)
    sequence_parallel = plan.recipe.parallel.sequence_parallel
    placements = between_layers(sequence_parallel)
    stage = SHARDING_STAGES[plan.recipe.parallel.sharding]
    shards: list[ParameterShard] = []

    def cut(name: str, parameter: Any) -> None:
        on_two_stages = is_tied(plan.model_config) and name == f"{cuts.embedding}.weight"
        is_frozen = name not in trained
        place = mesh.of_experts if cuts.is_expert(name) else mesh
        shard = ParameterShard(name, parameter, place, cuts.dim(name), stage, on_two_stages, is_frozen)
        if name.endswith(f".{SECOND_FACTOR}"):
            shard.master_or_shard.optimize_attr["learning_rate"] = ratio
        shards.append(shard)

    for chunk in chunks:
        num_before = len(shards)
        parallelize(chunk, cuts, mesh, read, dtype, sequence_parallel, cut)
        assign_buckets(shards[num_before:], cuts.is_expert, plan.gradient_bucket_bytes)
        if mesh.tensor is not None and backend.sends_beside_passes:
            overlap_sums(chunk, cuts, mesh)
        if engine.mode == "to_static":
            compile_layers(chunk, cuts, mesh, placements)
        if stage == 3:
            Zero3Hooks(chunk, cuts, shards[num_before:], is_tied(plan.model_config))
        if engine.recompute == "full":
            recompute_layers(chunk, cuts, engine.recompute_every)
        elif engine.recompute == "selective":
            recompute_attention(chunk, cuts)
    what = "" if adapters is None else f", {num_trained:,} of them trained,"
    report(f"{plan.family.name} with {count / 1e6:.1f}M parameters{what} on {mesh.degrees.num_ranks} x {backend.name}")
    edges = P2PChannels(mesh, ring=len(chunks) > 1) if pp > 1 else None
    part = PipelineStage(chunks, mesh, plan.model_config.hidden_size, placements, edges)
    own = [shard for shard in shards if shard.name in trained]
    balance = None
    if cuts.gates:
        train = plan.recipe.train
        balance = ExpertBalance(chunks, cuts, shards, mesh, train.expert_balance_loss, train.expert_bias_rate)
        part.marks_padding = True
    scales = InputScales(rounded, part, moving_rate) if qat.activation_bits is not None else None
    return BuiltModel(part, own, trained, bounds, digest.hexdigest(), adapters, balance, rounded, scales)


class WholeModel:
    """Parameters and optimizer state as a checkpoint has them, whatever rank holds them."""

    def __init__(self, plan: RunPlan, built: BuiltModel, optimizer: Optimizer, dtype: str, mesh: Mesh):
        cuts, shapes = plan.family.shard_plan or WHOLE, built.shapes
        here = mesh.coordinate["pp"]
        owners = {n: owner_stage(n, cuts, built.bounds, mesh.degrees.pp) for n in shapes}
        mine = {s.name: s for s in optimizer.shards if owners[s.name] == here}
        parameters = [
            GatheredTensor(
                n, shape, "float32" if cuts.is_gate_bias(n) else dtype, mine[n].gather_parameter if n in mine else None
            )
            for n, shape in shapes.items()
        ]
        held = {entry.name: entry for entry in optimizer.state()}
        slots, slot_owners, scalars = [], {}, {}
        for name, shape in shapes.items():
            for slot in optimizer.slots:
                full_name, is_scalar = f"{name}/{slot}", StateTensor.slot_is_scalar(slot)
                gather = _gather(held[full_name]) if name in mine else None
                slots.append(GatheredTensor(full_name, [1] if is_scalar else shape, "float32", gather))
                slot_owners[full_name] = owners[name]
                if is_scalar:  # not up to date where a rank owns nothing of the parameter: the first one owns some
                    scalars[full_name] = int(mesh.grid[owners[name]].flat[0])
        if built.adapters is None:
            names = plan.family.names()
            together = {name: names.hf_tensors(name, plan.model_config).names for name in shapes}
            self.parameters = _share_out(parameters, owners, mesh, together)
        else:  # they go into one file
            self.parameters = [_on_every_stage(tensor, owners[tensor.name]) for tensor in parameters]
        self.state = [
            dataclasses.replace(slot, writer=scalars.get(slot.name, slot.writer))
            for slot in _share_out(slots, slot_owners, mesh, {})
        ]


def _share_out(
    tensors: Sequence[GatheredTensor], owners: Mapping[str, int], mesh: Mesh, together: Mapping[str, Sequence[str]]
) -> list[GatheredTensor]:
    """Each pipeline stage's tensors over its ranks: one writes a tensor, and all of the stage bring it together."""
    writers: dict[str, int] = {}
    for stage, ranks in enumerate(mesh.grid):
        sizes = {tensor.name: tensor.num_bytes for tensor in tensors if owners[tensor.name] == stage}
        writers |= assign(sizes, [int(rank) for rank in ranks.flat], together)
    return [dataclasses.replace(tensor, writer=writers[tensor.name]) for tensor in tensors]


def _on_every_stage(tensor: GatheredTensor, owner: int) -> GatheredTensor:
    gather = tensor.gather

    def gather_everywhere() -> Any:
        return collective.from_stage(gather() if gather else None, tensor.shape, tensor.dtype, owner)

    return dataclasses.replace(tensor, gather=gather_everywhere)


def _gather(entry: StateTensor | None) -> Callable[[], Any] | None:
    if entry is None:
        return None
    if entry.is_scalar:
        # Paddle keeps these on the host, whatever the device
        return lambda: paddle.to_tensor(
            entry.value.numpy()
        )  # where the rank owns nothing it is not up to date, and not what is written
    return lambda: entry.shard.gather_part(entry.on_device())


def restore(path: Path, plan: RunPlan, registry: Registry, built: BuiltModel, optimizer: Optimizer, mesh: Mesh) -> None:
    """Load parameters and optimizer of a checkpoint, whatever mesh it was written on; each rank reads its slices."""
    cuts = plan.family.shard_plan or WHOLE
    if built.adapters is not None:
        values = _read_from(SavedAdapters(path, built.adapters, plan.family, plan.model_config))
    else:
        saved = open_model(path, registry.models)
        check_shapes(saved, {name: tuple(shape) for name, shape in built.shapes.items()})
        values = _read_from(saved)
    for shard in optimizer.shards:
        shard.load(read_local(shard.name, shard.shape, cuts, mesh, values))
        optimizer.to_host(shard)
    entries = list(optimizer.state())
    if not entries:
        return
    files = TensorFiles(path, "optimizer")
    slots = {f"{name}/{slot}" for name in built.shapes for slot in optimizer.slots}
    if differing := sorted(slots.symmetric_difference(files.names)):
        raise UserError(f"{path}: its optimizer has other tensors than this one: {', '.join(differing)}")

    def read(entry: StateTensor) -> np.ndarray:
        if entry.is_scalar:
            return files.read(entry.name)
        shard = entry.shard
        return shard.cut(files.read(entry.name, local_slice(shard.name, shard.shape, cuts, mesh)))

    optimizer.load_state(read)


def _with_factors(read: ReadSlice, seed: int) -> ReadSlice:
    """The values of a model, and of its adapters, which change nothing at first: A is random, B is zero.

    A has the variance of PyTorch's default for a matrix of as many inputs, 1 / (3 I), as in HF PEFT and PaddleNLP.
    """

    def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if name.endswith(f".{FIRST_FACTOR}"):
            return initial_values(seed, name, shape, (3 * shape[0]) ** -0.5, index)
        if name.endswith(f".{SECOND_FACTOR}"):
            return np.zeros([part.stop - part.start for part in index], "float32")
        return read(name, shape, index)

    return initial


def _read_from(source: ModelDirectory | SavedAdapters) -> ReadSlice:
    return lambda name, shape, index: source.read(name, index)


def _first_of(names: Collection[str], some: ReadSlice, others: ReadSlice) -> ReadSlice:
    return lambda name, shape, index: (some if name in names else others)(name, shape, index)


def _with_new_head(read: ReadSlice, seed: int, std: float) -> ReadSlice:
    def read_or_draw(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        return initial_values(seed, name, shape, std, index) if name == SCORE else read(name, shape, index)

    return read_or_draw


def draw(chunks: Sequence[Any], seed: int, std: float) -> ReadSlice:
    """The initial values of the parameters that a seed stands for, of a model in one part or several."""
    constants = {}
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        if parameter.ndim == 1:  # gains and biases start as their layers say
            parameter.initialize()
            constants[name] = parameter.numpy()

    def read(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        if name in constants:
            return constants[name][tuple(index)]
        return initial_values(seed, name, shape, std, index)

    return read
