"""This rank's part of the model: built without memory, cut by the pipeline, parallelized, with its initial weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import paddle

from llmsuite.checkpoint.adapter_dir import Adapters, check_layout
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.prefix_dir import Prefixes
from llmsuite.checkpoint.reft_dir import Interventions
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.ops import matmul, operand
from llmsuite.errors import UserError
from llmsuite.models.head import is_tied
from llmsuite.models.lora import adapted_modules, add_adapters
from llmsuite.models.mtp import is_embedding_shared, num_layers
from llmsuite.models.prefix import PrefixNetwork, add_prefixes
from llmsuite.models.qat import fake_quantize_layers, rounded_modules
from llmsuite.models.quantised import quantise_matrices
from llmsuite.models.reft import add_interventions
from llmsuite.models.reft_shapes import intervened_layers
from llmsuite.models.shard_plan import WHOLE, ShardPlan
from llmsuite.models.targets import frozen_matrices, is_factor, is_fixed, is_trained, quantised_modules
from llmsuite.parallel.cut import keep_part, layer_costs, part_bounds
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.overlap import modules_to_fuse
from llmsuite.parallel.p2p import P2PChannels
from llmsuite.parallel.parallelize import Strategy, parallelize, parallelize_without_values
from llmsuite.parallel.partition import SHARDING_STAGES
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.program.pipeline import Pipeline
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import between_layers
from llmsuite.parallel.vocabulary import build_padded, is_padded, pad_values
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.adapters import adapter_config
from llmsuite.train.expert_balance import ExpertBalance
from llmsuite.train.input_scales import InputScales
from llmsuite.train.weights import initial_weights


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """The result of `build_model`."""

    part: PipelineStage
    """This rank's part."""
    shards: list[ParameterShard]
    """This rank's shard of each of its trained parameters; adapters only, where there are any."""
    shapes: dict[str, list[int]]
    """Shape of every parameter that is saved, in the order of the layers: of the whole model, or of its adapters, with
    what those of PiSSA and LoRA-GA began with, which is not trained."""
    every_shard: list[ParameterShard]
    """As `shards`, with frozen parameters too."""
    every_shape: dict[str, list[int]]
    """Shape of every parameter of the whole model, its adapters included."""
    bounds: list[int]
    """Bounds of the pipeline's parts, see `part_bounds`."""
    digest: str
    """Changes with anything that decides the initial values; adapters change none, as they begin at zero."""
    adapters: Adapters | Interventions | Prefixes | None
    """Modules, rank and base of the adapters, or of interventions or prefixes, where those are trained."""
    balance: ExpertBalance | None
    """Balance of the experts, where the family has some."""
    rounded: list[str]
    """Names of the fake-quantised layers of the whole model, in order."""
    input_scales: InputScales | None
    """Input scales of those layers, where their inputs are rounded too."""
    carried: ModelDirectory | None
    """The files whose `carried` tensors are saved with the model, where there are any."""
    pipeline: Pipeline | None
    """What programs of whole steps need to know of the other stages, where a pipeline runs them."""


def build_model(plan: RunPlan, registry: Registry, backend: DeviceBackend, mesh: Mesh) -> BuiltModel:
    """Build this rank's part of the model with its initial weights."""
    recipe, shard_plan = plan.recipe, plan.family.shard_plan or WHOLE
    lora = recipe.lora
    moving_rate = recipe.qat.moving_rate  # read by every rank, also one whose layers have no use for it
    config = None if lora.rank is None else adapter_config(lora)
    network_size = recipe.prefix.network_size(plan.model_config.hidden_size)  # read by every rank, as the rate
    chunks, adapted, rounded = _build_chunks(plan, backend, config, mesh.degrees.tp)
    padded = is_padded(plan.model_config, mesh.degrees.tp)
    whole = _build_chunks(plan, backend, config, tp=1)[0][0] if padded else chunks[0]
    shapes = {name: list(p.shape) for name, p in whole.named_parameters()}
    trained = {name: shape for name, shape in shapes.items() if not recipe.freezes_model or is_trained(name)}
    saved = {name: shape for name, shape in shapes.items() if name in trained or is_fixed(name)}
    if lora.base_format is not None:
        with paddle.LazyGuard():
            for chunk in chunks:
                quantise_matrices(chunk, quantised_modules(shapes, shard_plan), lora.base_format)
    bounds = _cut_pipeline(chunks, plan, mesh, shapes)
    weights = initial_weights(plan, registry, chunks, shapes)
    narrow = frozen_matrices(shapes, shard_plan, trained) if plan.narrows_frozen else ()
    strategy = _strategy(plan, backend, mesh, trained, narrow)
    shards: list[ParameterShard] = []
    for chunk in chunks:
        shards += parallelize(chunk, strategy, pad_values(weights.read, shapes) if padded else weights.read)
    adapters: Adapters | Interventions | Prefixes | None = None
    if recipe.reft.rank is not None:
        layers = intervened_layers(recipe.reft.layers, plan.model_config.num_hidden_layers)
        adapters = Interventions(recipe.reft.rank, tuple(layers), recipe.reft.ends, weights.base)
    if recipe.prefix.tokens is not None:
        adapters = Prefixes(recipe.prefix.tokens, weights.base, network_size)
        if network_size is not None:
            _ = mesh.model_group  # all ranks make all groups of a mesh in the same order
    if config is not None:
        beside = [name for name in trained if not is_factor(name)]
        adapters = Adapters(adapted, config, weights.base, beside)
        check_layout(adapters, plan.family, plan.model_config)
    report_size(plan, backend, shapes, trained)

    channels = P2PChannels(mesh, ring=len(chunks) > 1) if mesh.degrees.pp > 1 else None
    placements = between_layers(recipe.parallel.sequence_parallel)
    part = PipelineStage(chunks, mesh, plan.model_config.hidden_size, placements, channels)
    part.dropout_seed = recipe.seed if lora.dropout else None
    part.edited_ends = recipe.reft.ends if recipe.reft.rank is not None else None
    pipeline = _pipeline(plan, backend, config, strategy, bounds) if recipe.engine.compiles_steps else None
    if pipeline is not None:
        check_stages(pipeline, trained, recipe.reft.rank is not None)
    balance = None
    if shard_plan.gates:
        loss, rate = recipe.train.expert_balance_loss, recipe.train.expert_bias_rate
        every_stage = None if pipeline is None else pipeline.model
        balance = ExpertBalance(chunks, shard_plan, shards, mesh, loss, rate, every_stage)
        part.marks_padding = True
    scales = InputScales(rounded, part, moving_rate) if recipe.qat.activation_bits is not None else None
    own = [shard for shard in shards if shard.name in trained]
    carried = weights.source if weights.source is not None and weights.source.carried else None
    return BuiltModel(
        part, own, saved, shards, shapes, bounds, weights.digest, adapters, balance, rounded, scales, carried, pipeline
    )


def _build_chunks(
    plan: RunPlan, backend: DeviceBackend, config: Any | None, tp: int
) -> tuple[list[Any], list[str], list[str]]:
    """The whole model once for every chunk of this rank, without memory, with its adapters and fake-quantised layers.

    Args:
        plan: of the run.
        backend: of the device.
        config: of the adapters; None for none.
        tp: tensor parallel degree that the vocabulary is padded for.

    Returns:
        The chunks, the names of the modules with adapters, and those of the fake-quantised layers.
    """
    lora, qat, reft = plan.recipe.lora, plan.recipe.qat, plan.recipe.reft
    shard_plan = plan.family.shard_plan or WHOLE
    adapted: list[str] = []
    rounded: list[str] = []
    network_size = plan.recipe.prefix.network_size(plan.model_config.hidden_size)
    network: PrefixNetwork | None = None
    chunks = []
    for _ in range(plan.num_chunks):
        with paddle.LazyGuard():
            model = build_padded(plan.family, plan.model_config, backend.ops(plan.recipe.engine.precision), tp)
            if config is not None:
                adapted = adapted_modules(model, shard_plan, lora.target_modules)
                add_adapters(model, adapted, config, plan.recipe.seed)
                _check_dropout(lora.dropout, adapted, shard_plan)
            if reft.rank is not None:
                layers = intervened_layers(reft.layers, plan.model_config.num_hidden_layers)
                add_interventions(model, layers, reft.rank, reft.ends)
            if plan.recipe.prefix.tokens is not None:
                network = add_prefixes(model, plan.recipe.prefix.tokens, network_size, network)
            if qat.weight_bits is not None:
                rounded = rounded_modules(model, shard_plan, qat.target_modules)
                fake_quantize_layers(model, rounded, rounds_weight=True)
            chunks.append(model)
    if plan.recipe.parallel.fuse_projections and not modules_to_fuse(chunks[0], shard_plan):
        raise UserError(
            f"parallel.fuse_projections: is true, but no module of the family {plan.family.name} has projections to "
            "fuse; set it to false"
        )
    return chunks, adapted, rounded


def _check_dropout(rate: float, adapted: Sequence[str], shard_plan: ShardPlan) -> None:
    """Raise UserError for adapters with dropout that are not told which tokens they get."""
    inside = f"{shard_plan.layers}.", shard_plan.embedding  # of an id nothing is dropped
    outside = [module for module in adapted if not module.startswith(inside)]
    if rate and outside:
        raise UserError(
            f"lora.dropout: is {rate}, and lora.target_modules names {outside[0]}; dropout is for the decoder layers, "
            "where it is known which tokens go in: a stage picks those that the head gets. Set it to 0, or leave that "
            "module out"
        )


def _cut_pipeline(chunks: Sequence[Any], plan: RunPlan, mesh: Mesh, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Leave in each chunk what belongs to its part of the pipeline; returns the bounds of the parts."""
    count, pp = num_layers(plan.model_config), mesh.degrees.pp
    if pp == 1:
        return [0, count]
    shard_plan, shared = plan.family.shard_plan or WHOLE, is_embedding_shared(plan.model_config)
    costs = layer_costs(shapes, shard_plan, count, shared)
    bounds = part_bounds(plan.recipe.parallel.pipeline_cut, costs, pp * plan.num_chunks)
    for number, chunk in enumerate(chunks):
        keep_part(chunk, shard_plan, number * pp + mesh.coordinate["pp"], bounds, shared)
    return bounds


def _strategy(
    plan: RunPlan,
    backend: DeviceBackend,
    mesh: Mesh,
    trained: Mapping[str, Sequence[int]],
    narrow: Collection[str],
) -> Strategy:
    engine, parallel = plan.recipe.engine, plan.recipe.parallel
    ops = backend.ops(engine.precision)
    if engine.mode == "to_static" and plan.degrees.tp > 1 and ops.operand is operand:
        # products on parts have no gradient in programs of layers; where they round nothing, Paddle's own are as good
        ops = dataclasses.replace(ops, matmul=matmul, sum_matmul=None, program_matmul=None)
    if engine.mode == "to_static" and ops.matmul is not matmul and ops.program_matmul is None:
        raise UserError(
            f"engine.precision: is {engine.precision}, whose products in programs need kernels that are built by g++; "
            "install it, or set engine.mode to dynamic"
        )
    stage = SHARDING_STAGES[parallel.sharding]
    in_slices = engine.compiles_steps and stage == 3 and plan.degrees.num_data_ranks > 1
    return Strategy(
        mesh=mesh,
        shard_plan=plan.family.shard_plan or WHOLE,
        dtype=backend.parameter_dtype(engine.precision),
        narrow=narrow,
        ops=ops,
        trained=trained.keys(),
        is_tied=is_tied(plan.model_config),
        shares_embedding=is_embedding_shared(plan.model_config),
        sequence_parallel=parallel.sequence_parallel,
        head_takes_all=plan.stage.takes_all,
        fuse_projections=parallel.fuse_projections,
        # programs share out the state of the optimizer by themselves
        sharding_stage=stage if in_slices or not engine.compiles_steps else 0,
        slices=in_slices,
        bucket_bytes=plan.gradient_bucket_bytes,
        overlap=backend.sends_beside_passes,
        adds_sparse_rows=backend.adds_sparse_rows,
        compile=engine.compiles_layers,
        recompute=engine.recompute,
        recompute_every=engine.recompute_every,
        loss_chunk_tokens=engine.loss_chunk_tokens,
    )


def _pipeline(
    plan: RunPlan, backend: DeviceBackend, config: Any | None, strategy: Strategy, bounds: Sequence[int]
) -> Pipeline | None:
    """The modules of all stages, which a program of whole steps is made of; None without a pipeline.

    They are those of `_build_chunks`, with adapters of this `config`, parallelized as the parts of the ranks are."""
    mesh = strategy.mesh
    if mesh.degrees.pp == 1:
        return None
    (whole, *_), _, _ = _build_chunks(plan, backend, config, mesh.degrees.tp)
    parallelize_without_values(whole, strategy)
    return Pipeline(
        whole,
        strategy.shard_plan,
        bounds,
        mesh.degrees.pp,
        strategy.shares_embedding,
        plan.schedule,
        mesh.coordinate["pp"],
        mesh.degrees.sharding if strategy.slices else 1,
        mesh.degrees.ep,
        strategy.dtype,
    )


def check_stages(pipeline: Pipeline, trained: Iterable[str], edits: bool = False) -> None:
    """Raise UserError where a stage has no parameter to train: its part of a program would know of no learning rate.
    With `edits`, these are interventions, else adapters."""
    idle = {*range(pipeline.num_stages)} - {pipeline.stage_of(name) for name in trained}
    if idle:
        first, last = pipeline.bounds[min(idle)], pipeline.bounds[min(idle) + 1] - 1
        what = "reft.layers: has no layer" if edits else "lora.target_modules: has no matrix"
        raise UserError(
            f"{what} of pipeline stage {min(idle)}, and pipelines of engine.program step train on each; add one of "
            f"layers {first} to {last}, or set engine.program to layers"
        )


def report_size(
    plan: RunPlan, backend: DeviceBackend, shapes: Mapping[str, Sequence[int]], trained: Mapping[str, Sequence[int]]
) -> None:
    """Tell how large a model is; shapes of all its parameters, and of those that are trained."""
    count, num_trained = (sum(math.prod(shape) for shape in of.values()) for of in (shapes, trained))
    some = "" if not plan.recipe.freezes_model else f", {num_trained:,} of them trained,"
    ranks = f"{plan.degrees.num_ranks} x {backend.name}"
    if caution := backend.caution(plan.recipe.engine.precision):
        report(f"warning: {caution}")
    report(f"{plan.family.name} with {count / 1e6:.1f}M parameters{some} on {ranks}")
