"""Construction of this rank's part of the model: built lazily, cut into pipeline stages, parallelized, filled with its
initial weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import paddle

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.layers.prefix import PrefixNetwork, add_prefixes
from llmsuite.adapters.layers.reft import add_interventions
from llmsuite.adapters.parameters import is_factor, is_fixed, is_transposed
from llmsuite.adapters.reft_shapes import intervened_layers
from llmsuite.base.errors import UserError
from llmsuite.base.progress import report
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import Adapters, check_layout
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.prefix_dir import Prefixes
from llmsuite.checkpoint.reft_dir import Interventions
from llmsuite.contract.registry import Registry
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.engine.expert_balance import ExpertBalance
from llmsuite.engine.input_scales import InputScales
from llmsuite.engine.weights import initial_weights
from llmsuite.models.adapter_method import AdapterConfig
from llmsuite.models.head import is_tied
from llmsuite.models.mtp import is_embedding_shared, num_layers
from llmsuite.models.qat import fake_quantize_layers, rounded_modules
from llmsuite.models.quantised import quantise_matrices
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.models.targets import frozen_matrices, quantised_modules
from llmsuite.parallel.chunked_loss import ChunkedLosses
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.overlap import modules_to_fuse
from llmsuite.parallel.p2p import P2PChannels
from llmsuite.parallel.parallelize import Strategy, parallelize, parallelize_without_values
from llmsuite.parallel.partition import SHARDING_STAGES
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.pipeline_split import keep_part, layer_costs, part_bounds
from llmsuite.parallel.program.pipeline import Pipeline
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import between_layers
from llmsuite.parallel.vocabulary import build_padded, is_padded, pad_values
from llmsuite.recipe.plans import ModelPlan, ParallelPlan, TrainPlan


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """This rank's part of the model, with the facts about the full model that the rest of a run needs."""

    part: PipelineStage
    """Pipeline stage of this rank."""
    shards: list[ParameterShard]
    """This rank's shard of each of its trained parameters; of adapters only, where there are any."""
    shapes: dict[str, list[int]]
    """Shape of every parameter that is saved, in the order of the layers: those of the full model, or of its adapters
    with the initial factors of PiSSA and LoRA-GA, which are not trained."""
    every_shard: list[ParameterShard]
    """Shards of all parameters of this rank, frozen ones too."""
    every_shape: dict[str, list[int]]
    """Shape of every parameter of the full model, its adapters included."""
    is_transposed: Callable[[str], bool]
    """Returns True for the name of a parameter that PyTorch stores transposed."""
    bounds: list[int]
    """Layer bounds of the pipeline stages, see `part_bounds`."""
    digest: str
    """Digest of everything that decides the initial values; adapters do not count, as they start at zero."""
    adapters: Adapters | Interventions | Prefixes | None
    """Modules, rank and base model of the adapters, interventions or prefixes, where those are trained."""
    balance: ExpertBalance | None
    """Balance of the experts, for families with experts."""
    rounded: list[str]
    """Names of the fake-quantised layers of the full model, in order."""
    input_scales: InputScales | None
    """Input scales of the fake-quantised layers, where their inputs are rounded too."""
    carried: ModelDirectory | None
    """Model directory whose `carried` tensors are saved with the model, where there are any."""
    pipeline: Pipeline | None
    """Modules and bounds of all pipeline stages, for compiled train steps on a pipeline."""


def build_model(
    model_plan: ModelPlan,
    parallel_plan: ParallelPlan,
    train_plan: TrainPlan,
    registry: Registry,
    backend: DeviceBackend,
    mesh: Mesh,
) -> BuiltModel:
    """Build this rank's part of the model with its initial weights."""
    shard_plan = model_plan.shard_plan
    hidden_size = model_plan.config.hidden_size
    engine = parallel_plan.engine
    lora = model_plan.lora
    reft = model_plan.reft
    config = None if lora.rank is None else lora.adapter_config
    chunks, adapted, rounded = _build_chunks(model_plan, parallel_plan, backend, config, mesh.degrees.tp)
    padded = is_padded(model_plan.config, mesh.degrees.tp)
    unpadded = _build_chunks(model_plan, parallel_plan, backend, config, tp=1)[0][0] if padded else chunks[0]
    shapes = {name: list(p.shape) for name, p in unpadded.named_parameters()}
    trained = {name: shape for name, shape in shapes.items() if model_plan.trains(name)}
    saved = {name: shape for name, shape in shapes.items() if name in trained or is_fixed(name)}
    if lora.base_format is not None:
        with paddle.LazyGuard():  # codes and scales without memory, which `parallelize` fills
            for chunk in chunks:
                quantise_matrices(chunk, quantised_modules(shapes, shard_plan), lora.base_format)
    bounds = _cut_pipeline(chunks, model_plan, parallel_plan, mesh, shapes)
    # without values no file is opened: it need not be there
    loaded = model_plan if backend.has_values else dataclasses.replace(model_plan, weights=None)
    weights = initial_weights(loaded, engine.precision, registry, chunks, shapes)
    bf16_frozen: Collection[str] = ()
    if model_plan.keeps_frozen_bf16(parallel_plan):
        bf16_frozen = frozen_matrices(shapes, shard_plan, trained)
    needs_all_logits = "all_logits" in train_plan.stage.capabilities
    strategy = _strategy(model_plan, parallel_plan, needs_all_logits, backend, mesh, trained, bf16_frozen)
    read = pad_values(weights.read, shapes) if padded else weights.read
    shards: list[ParameterShard] = []
    for chunk in chunks:
        shards += parallelize(chunk, strategy, read if backend.has_values else None)
    adapters = _describe_adapters(model_plan, adapted, config, weights.base, trained)
    if isinstance(adapters, Prefixes) and model_plan.prefix_network_size is not None:
        _ = mesh.model_group  # a collective call: every rank has to create the groups of a mesh in the same order
    report_size(model_plan, parallel_plan, backend, shapes, trained)

    channels = P2PChannels(mesh, ring=len(chunks) > 1) if mesh.degrees.pp > 1 else None
    placements = between_layers(parallel_plan.section.sequence_parallel)
    part = PipelineStage(chunks, mesh, hidden_size, placements, channels)
    if engine.loss_chunk_tokens is not None:
        part.chunked_losses = ChunkedLosses(part.model, engine.loss_chunk_tokens, mesh, shards)
    if lora.dropout:
        part.dropout_seed = model_plan.seed
    if reft.rank is not None:
        part.edited_ends = reft.ends
    pipeline: Pipeline | None = None
    if engine.compiles_steps:
        pipeline = _pipeline(model_plan, parallel_plan, backend, config, strategy, bounds)
    if pipeline is not None:
        check_stages(pipeline, trained, reft.rank is not None)
    balance = None
    if shard_plan.gates:
        loss = train_plan.section.expert_balance_loss
        rate = train_plan.section.expert_bias_rate
        every_stage = None if pipeline is None else pipeline.model
        balance = ExpertBalance(chunks, shard_plan, shards, mesh, loss, rate, every_stage)
        part.needs_padding_mask = True
    scales: InputScales | None = None
    if model_plan.qat.activation_bits is not None:
        scales = InputScales(rounded, part, model_plan.qat.moving_rate)
    own = [shard for shard in shards if shard.name in trained]
    carried = None
    if weights.source is not None and weights.source.carried:
        carried = weights.source
    transposed = functools.partial(is_transposed, names=model_plan.family.names())
    return BuiltModel(
        part, own, saved, shards, shapes, transposed, bounds, weights.digest, adapters, balance, rounded, scales,
        carried, pipeline,
    )  # fmt: skip


def _build_chunks(
    model_plan: ModelPlan,
    parallel_plan: ParallelPlan,
    backend: DeviceBackend,
    config: AdapterConfig | None,
    tp: int,
) -> tuple[list[Any], list[str], list[str]]:
    """Build the full model once for every chunk of this rank, lazily, with its adapters and fake-quantised layers.

    Args:
        model_plan: plan of the model.
        parallel_plan: plan of the parallelism.
        backend: backend of the device.
        config: configuration of the adapters; None for none.
        tp: tensor parallel degree that the vocabulary is padded for.

    Returns:
        The chunks, the names of the modules with adapters, and those of the fake-quantised layers.
    """
    lora = model_plan.lora
    qat = model_plan.qat
    reft = model_plan.reft
    shard_plan = model_plan.shard_plan
    ops = backend.ops(parallel_plan.engine.precision)
    adapted: list[str] = []
    rounded: list[str] = []
    network_size = model_plan.prefix_network_size
    network: PrefixNetwork | None = None
    chunks = []
    for _ in range(parallel_plan.num_chunks):
        with paddle.LazyGuard():  # parameters without memory: a rank fills only its shards of them
            model = build_padded(model_plan.family, model_plan.config, ops, tp)
            if config is not None:
                adapted = adapted_modules(model, shard_plan, lora.target_modules)
                add_adapters(model, adapted, config, model_plan.seed, model_plan.full_modules)
                _check_dropout(lora.dropout, adapted, shard_plan)
            if reft.rank is not None:
                layers = intervened_layers(reft.layers, model_plan.config.num_hidden_layers)
                add_interventions(model, layers, reft.rank, reft.ends)
            if model_plan.prefix.tokens is not None:
                network = add_prefixes(model, model_plan.prefix.tokens, network_size, network)
            if qat.weight_bits is not None:
                rounded = rounded_modules(model, shard_plan, qat.target_modules)
                fake_quantize_layers(model, rounded, rounds_weight=True)
            chunks.append(model)
    if parallel_plan.section.fuse_projections and not modules_to_fuse(chunks[0], shard_plan):
        raise UserError(
            f"parallel.fuse_projections: is true, but no module of the family {model_plan.family.name} has projections "
            "to fuse; set it to false"
        )
    return chunks, adapted, rounded


def _describe_adapters(
    model_plan: ModelPlan,
    adapted: list[str],
    config: AdapterConfig | None,
    base: Base,
    trained: Iterable[str],
) -> Adapters | Interventions | Prefixes | None:
    """Describe the adapters, interventions or prefixes for checkpoints; None where the model itself is trained.

    Args:
        model_plan: plan of the model.
        adapted: modules with adapters.
        config: configuration of the adapters; None for none.
        base: base model.
        trained: names of the trained parameters.
    """
    if config is not None:
        trained_base = [name for name in trained if not is_factor(name)]
        adapters = Adapters(adapted, config, base, trained_base)
        check_layout(adapters, model_plan.family, model_plan.config)
        return adapters
    if model_plan.prefix.tokens is not None:
        return Prefixes(model_plan.prefix.tokens, base, model_plan.prefix_network_size)
    reft = model_plan.reft
    if reft.rank is not None:
        layers = intervened_layers(reft.layers, model_plan.config.num_hidden_layers)
        return Interventions(reft.rank, tuple(layers), reft.ends, base)
    return None


def _check_dropout(rate: float, adapted: Sequence[str], shard_plan: ShardPlan) -> None:
    """Raise UserError for adapters with dropout on modules that do not know which tokens they get."""
    inside = f"{shard_plan.layers}.", shard_plan.embedding  # nothing of an id is dropped
    outside = [module for module in adapted if not module.startswith(inside)]
    if rate and outside:
        raise UserError(
            f"lora.dropout: is {rate}, and lora.target_modules names {outside[0]}; dropout is for the decoder layers, "
            "where it is known which tokens go in: a stage picks those that the head gets. Set it to 0, or leave that "
            "module out"
        )


def _cut_pipeline(
    chunks: Sequence[Any],
    model_plan: ModelPlan,
    parallel_plan: ParallelPlan,
    mesh: Mesh,
    shapes: Mapping[str, Sequence[int]],
) -> list[int]:
    """Keep in each chunk only the layers of its pipeline stage; returns the bounds of the stages."""
    count = num_layers(model_plan.config)
    pp = mesh.degrees.pp
    if pp == 1:
        return [0, count]
    shard_plan = model_plan.shard_plan
    shared = is_embedding_shared(model_plan.config)
    costs = layer_costs(shapes, shard_plan, count, shared)
    bounds = part_bounds(parallel_plan.section.pipeline_cut, costs, pp * parallel_plan.num_chunks)
    for number, chunk in enumerate(chunks):
        keep_part(chunk, shard_plan, number * pp + mesh.coordinate["pp"], bounds, shared)
    return bounds


def _strategy(
    model_plan: ModelPlan,
    parallel_plan: ParallelPlan,
    needs_all_logits: bool,
    backend: DeviceBackend,
    mesh: Mesh,
    trained: Mapping[str, Sequence[int]],
    bf16_frozen: Collection[str],
) -> Strategy:
    engine = parallel_plan.engine
    parallel = parallel_plan.section
    ops = backend.ops(engine.precision)
    if engine.mode == "to_static" and parallel_plan.degrees.tp > 1 and not ops.matmuls.rounds_inputs:
        # our matmuls on shards have no gradient in to_static layers; where they round nothing, Paddle's are as good
        ops = dataclasses.replace(ops, matmuls=MatmulOps())
    if engine.mode == "to_static" and ops.matmuls.has_device_matmul and ops.matmuls.program_matmul is None:
        raise UserError(
            f"engine.precision: is {engine.precision}, whose matmuls in programs need kernels that are built by g++; "
            "install it, or set engine.mode to dynamic"
        )
    sharding_stage = SHARDING_STAGES[parallel.sharding]
    in_slices = engine.compiles_steps and sharding_stage == 3 and parallel_plan.degrees.num_data_ranks > 1
    # compiled train steps shard the optimizer state by themselves
    eager_sharding = sharding_stage if in_slices or not engine.compiles_steps else 0
    return Strategy(
        mesh=mesh,
        shard_plan=model_plan.shard_plan,
        dtype=backend.parameter_dtype(engine.precision),
        bf16_frozen=bf16_frozen,
        ops=ops,
        trained=trained.keys(),
        master_weights=parallel_plan.master_weights,
        shares_first_factors=model_plan.lora.share_first,
        is_tied=is_tied(model_plan.config),
        shares_embedding=is_embedding_shared(model_plan.config),
        sequence_parallel=parallel.sequence_parallel,
        head_needs_all_logits=needs_all_logits,
        fuse_projections=parallel_plan.fuses_projections,
        sharding_stage=eager_sharding,
        slices=in_slices,
        bucket_bytes=parallel_plan.gradient_bucket_bytes,
        overlap=backend.overlaps_communication,
        adds_sparse_gradients=backend.adds_sparse_gradients,
        compile=engine.compiles_layers,
        recompute=engine.recompute,
        recompute_every=engine.recompute_every,
    )


def _pipeline(
    model_plan: ModelPlan,
    parallel_plan: ParallelPlan,
    backend: DeviceBackend,
    config: AdapterConfig | None,
    strategy: Strategy,
    bounds: Sequence[int],
) -> Pipeline | None:
    """Build the modules of all pipeline stages, which compiled train steps are traced from; None without a pipeline.

    They are those of `_build_chunks`, with adapters of this `config`, parallelized as the stages of the ranks are."""
    mesh = strategy.mesh
    if mesh.degrees.pp == 1:
        return None
    (full_model, *_), _, _ = _build_chunks(model_plan, parallel_plan, backend, config, mesh.degrees.tp)
    parallelize_without_values(full_model, strategy)
    sharding_degree = mesh.degrees.sharding if strategy.slices else 1
    return Pipeline(
        full_model,
        strategy.shard_plan,
        bounds,
        mesh.degrees.pp,
        strategy.shares_embedding,
        parallel_plan.schedule,
        mesh.coordinate["pp"],
        sharding_degree,
        mesh.degrees.ep,
        strategy.dtype,
    )


def check_stages(pipeline: Pipeline, trained: Iterable[str], edits: bool = False) -> None:
    """Raise UserError where a pipeline stage has no trained parameter: its part of a program would have no learning
    rate. With `edits`, the trained parameters are interventions, else adapters."""
    idle = {*range(pipeline.num_stages)} - {pipeline.stage_of(name) for name in trained}
    if idle:
        first = pipeline.bounds[min(idle)]
        last = pipeline.bounds[min(idle) + 1] - 1
        what = "reft.layers: has no layer" if edits else "lora.target_modules: has no matrix"
        raise UserError(
            f"{what} of pipeline stage {min(idle)}, and pipelines of engine.program step train on each; add one of "
            f"layers {first} to {last}, or set engine.program to layers"
        )


def report_size(
    model_plan: ModelPlan,
    parallel_plan: ParallelPlan,
    backend: DeviceBackend,
    shapes: Mapping[str, Sequence[int]],
    trained: Mapping[str, Sequence[int]],
) -> None:
    """Report the number of parameters, given the shapes of all of them and of the trained ones."""
    count = sum(map(math.prod, shapes.values()))
    num_trained = sum(map(math.prod, trained.values()))
    some = f", {num_trained:,} of them trained," if model_plan.is_frozen else ""
    ranks = f"{parallel_plan.degrees.num_ranks} x {backend.name}"
    if precision_warning := backend.precision_warning(parallel_plan.engine.precision):
        report(f"warning: {precision_warning}")
    report(f"{model_plan.family.name} with {count / 1e6:.1f}M parameters{some} on {ranks}")
