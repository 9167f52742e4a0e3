"""Rules about the strategy: devices, degrees, model shape, batches and precision."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.models.mtp import num_layers
from llmsuite.models.protocols import HasPositions, shape_fields
from llmsuite.recipe.rules.context import RuleContext


def _no_grid(context: RuleContext) -> Iterator[Violation]:
    p = context.recipe.parallel
    if context.num_devices % context.ranks_per_replica:
        yield (
            "launch.num_devices",
            f"{context.num_devices} devices cannot hold tensor {p.tensor_parallel_degree} x pipeline "
            f"{p.pipeline_parallel_degree} x sharding {p.sharding_parallel_degree} = {context.ranks_per_replica} "
            f"ranks; use a multiple of {context.ranks_per_replica}",
        )


def _uneven_shards(context: RuleContext) -> Iterator[Violation]:
    if context.config is not None:
        for message in context.shard_plan.problems(context.config, context.recipe.parallel.tensor_parallel_degree):
            yield "parallel.tensor_parallel_degree", message


def _no_shard_plan(context: RuleContext) -> Iterator[Violation]:
    parallel = context.recipe.parallel
    if context.shard_plan.layers or context.shard_plan.is_auto_parallel:
        return
    pp = parallel.pipeline_parallel_degree
    if pp > 1:
        yield (
            "parallel.pipeline_parallel_degree",
            f"is {pp}; the shard plan of this family names no layers to split; set it to 1",
        )
    if parallel.sharding == "stage3":
        yield "parallel.sharding", "is stage3; the shard plan of this family names no modules to gather; use stage2"
    if context.recipe.engine.mode == "to_static":
        yield "engine.mode", "is to_static; the shard plan of this family names no layers to compile; use dynamic"
    kind = context.recipe.engine.recompute
    if kind != "none":
        yield "engine.recompute", f"is {kind}; the shard plan of this family names no layers to recompute; use none"


def _empty_part(context: RuleContext) -> Iterator[Violation]:
    if context.config is None or not context.shard_plan.layers:
        return
    pp = context.recipe.parallel.pipeline_parallel_degree
    chunks = context.recipe.parallel.num_chunks
    layers = num_layers(context.config)
    if pp > layers:
        yield "parallel.pipeline_parallel_degree", f"is {pp}; the model has {layers} layers; use at most {layers}"
    elif pp * chunks > layers:
        message = f"is {chunks}: {pp} pipeline stages have {pp * chunks} chunks, but the model has {layers} layers"
        yield "parallel.virtual_pipeline_degree", message


def _wrong_cut(context: RuleContext) -> Iterator[Violation]:
    parallel = context.recipe.parallel
    pp = parallel.pipeline_parallel_degree
    chunks = parallel.num_chunks
    cut = parallel.pipeline_cut
    if context.config is None or isinstance(cut, str) or pp * chunks > num_layers(context.config):
        return
    if len(cut) != pp * chunks - 1:
        parts = f"{pp} pipeline stages x {chunks} chunks = {pp * chunks} parts"
        message = f"names {len(cut)} layers; {parts}: name the first layer of each but the first, {pp * chunks - 1}"
        yield "parallel.pipeline_cut", message
    elif cut[-1] >= num_layers(context.config):
        last = num_layers(context.config) - 1
        yield "parallel.pipeline_cut", f"names layer {cut[-1]}; the model has layers 0 to {last}"


def _nothing_to_shard(context: RuleContext) -> Iterator[Violation]:
    sharding = context.recipe.parallel.sharding
    if context.shard_plan.is_auto_parallel:  # another rule reports it
        return
    if (
        sharding != "none"
        and context.degrees.num_data_ranks == 1
        and context.num_devices % context.ranks_per_replica == 0
    ):
        message = f"is {sharding}, but there is one data rank ({context.degrees}); set it to none"
        yield "parallel.sharding", message


def _not_to_be_fused(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    key = "parallel.fuse_projections"
    if not recipe.parallel.fuse_projections:
        return
    if recipe.engine.mode == "to_static":
        yield key, "is true, but compiled layers reduce these gradients in one all-reduce in any case; set it to false"
    if recipe.freezes_model:
        yield (
            key,
            "is true; it supports training all parameters only, without adapters or interventions; set it to false",
        )
    if recipe.qat.weight_bits is not None:
        yield key, "is true, but qat rounds the weights of each layer separately; set it to false"


def _no_experts(context: RuleContext) -> Iterator[Violation]:
    ep = context.recipe.parallel.expert_parallel_degree
    if ep > 1 and not context.shard_plan.experts:
        yield "parallel.expert_parallel_degree", f"is {ep}, but this family has no routed experts; remove it"


def _uneven_experts(context: RuleContext) -> Iterator[Violation]:
    d = context.degrees
    key = "parallel.expert_parallel_degree"
    if d.ep == 1 or not context.shard_plan.experts or context.num_devices % context.ranks_per_replica:
        return
    if d.num_data_ranks % d.ep:
        yield key, f"is {d.ep}, which does not divide the data ranks = {d.num_data_ranks}"
    elif d.sharding % d.ep and d.ep % d.sharding:
        yield key, f"is {d.ep}, which neither divides the sharding degree {d.sharding} nor is a multiple of it"
    if context.config is None:
        return
    count = shape_fields(context.config)[context.shard_plan.num_experts]
    if count % (d.ep * d.tp):
        of_tp = ""
        if d.tp > 1:
            of_tp = f" x tensor parallel degree {d.tp} = {d.ep * d.tp}"
        yield key, f"is {d.ep}{of_tp}, which does not divide {context.shard_plan.num_experts} = {count}"


def _no_balance(context: RuleContext) -> Iterator[Violation]:
    train = context.recipe.train
    weights = {"expert_balance_loss": train.expert_balance_loss, "expert_bias_rate": train.expert_bias_rate}
    for key, weight in weights.items():
        if weight and not context.shard_plan.gates:
            yield f"train.{key}", f"is {weight}; this family has no routed experts; set it to 0"
    if not train.expert_bias_rate or not context.shard_plan.gates or context.config is None:
        return
    if not context.config.has_gate_bias:
        yield "train.expert_bias_rate", "has no effect: the router of this shape has no bias; set it to 0"
    elif context.recipe.lora.rank is not None:
        yield "train.expert_bias_rate", "changes a bias of the model, which is frozen with adapters; set it to 0"


def _uneven_batch(context: RuleContext) -> Iterator[Violation]:
    train = context.recipe.train
    ranks = context.degrees.num_data_ranks
    if train.micro_batch_tokens is not None:
        if train.global_batch_size % ranks:
            yield (
                "train.global_batch_size",
                f"is {train.global_batch_size}; it has to be a multiple of {ranks} data ranks",
            )
        return
    per_pass = train.micro_batch_size * ranks
    if train.global_batch_size % per_pass and context.num_devices % context.ranks_per_replica == 0:
        yield (
            "train.global_batch_size",
            f"is {train.global_batch_size}; it has to be a multiple of micro_batch_size {train.micro_batch_size} x "
            f"data ranks {ranks} = {per_pass}",
        )


def _too_long(context: RuleContext) -> Iterator[Violation]:
    longest = context.recipe.data.max_length
    if not isinstance(context.config, HasPositions):
        return
    positions = context.config.max_position_embeddings
    if positions is not None and longest > positions:
        yield "data.max_length", f"is {longest}; the model has at most {positions} positions (max_position_embeddings)"


def _blocks_on_the_host(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if recipe.engine.offload_optimizer and recipe.train.optimizer == "adamw_8bit":
        yield "engine.offload_optimizer", "is true, which adamw_8bit does not support; set it to false, or choose adamw"


def _no_masters(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if recipe.train.master_weights:
        return
    key = "train.master_weights"
    precision = recipe.engine.precision
    if precision == "fp32":
        yield key, "is false, but parameters are float32 with engine.precision fp32; set that to bf16, or this to true"
    elif precision == "fp16":
        yield (
            key,
            "is false, but second moments below 6e-8 would be 0 with engine.precision fp16; set that to bf16, or this "
            "to true",
        )
    elif context.backend is not None and context.backend.parameter_dtype(precision) == "float32":
        message = f"is false, but {recipe.device} keeps parameters in float32 with engine.precision {precision}"
        yield key, f"{message}; set it to true"
    if recipe.engine.offload_optimizer:
        yield (
            "engine.offload_optimizer",
            "is true, which train.master_weights false does not support: parameters are updated where they are; set it "
            "to false, or train.master_weights to true",
        )


def _no_such_precision(context: RuleContext) -> Iterator[Violation]:
    precision = context.recipe.engine.precision
    if context.precisions is not None and precision not in context.precisions:
        known = ", ".join(context.precisions)
        is_stored = context.backend is not None and precision in context.backend.weight_only_precisions
        hint = ""
        if is_stored and not context.stage.trains:
            hint = f", or `llmsuite generate MODEL --input FILE --precision {precision}`, on one device"
        yield "engine.precision", f"is {precision}, which {context.recipe.device} does not support; use {known}{hint}"


def _not_in_programs(context: RuleContext) -> Iterator[Violation]:
    engine = context.recipe.engine
    device = context.recipe.device
    is_own_product = engine.precision in context.matmul_precisions
    if is_own_product and engine.compiles_layers and context.recipe.parallel.tensor_parallel_degree > 1:
        yield (
            "engine.precision",
            f"is {engine.precision}, whose matrix products on {device} run on the shard of each rank, which compiled "
            "layers with tensor parallelism do not support; set engine.program to step, engine.mode to dynamic, or "
            "engine.precision to fp32",
        )


def _would_hang(context: RuleContext) -> Iterator[Violation]:
    parallel = context.recipe.parallel
    backend = context.backend
    if backend is None or parallel.pipeline_parallel_degree == 1:
        return
    if parallel.pipeline_schedule == "interleaved" and not backend.supports_interleaving:
        also = ""
        if parallel.virtual_pipeline_degree is not None:
            also = " and remove virtual_pipeline_degree"
        yield (
            "parallel.pipeline_schedule",
            f"is interleaved, which deadlocks on {backend.name}: a copy to or from the host waits for messages in "
            f"flight, and the ranks wait for each other; set it to 1F1B{also}",
        )
    if context.recipe.engine.compiles_steps and not backend.supports_step_pipelines:
        yield (
            "engine.program",
            f"is step, but {backend.name} does not support it with a pipeline: operations wait for events, which "
            "Paddle 3.3.1 records on some devices only; set it to layers, or parallel.pipeline_parallel_degree to 1",
        )


def _not_on_this_device(context: RuleContext) -> Iterator[Violation]:
    backend = context.backend
    if backend is None:
        return
    tp = context.recipe.parallel.tensor_parallel_degree
    if tp > 1 and context.recipe.engine.precision == "fp32" and not backend.accumulates_distributed_gradients:
        yield (
            "parallel.tensor_parallel_degree",
            f"is {tp} with engine.precision fp32, but Paddle 3.3.1 does not add gradients of distributed tensors on "
            f"{backend.name}; set engine.precision to bf16 or fp16, or parallel.tensor_parallel_degree to 1",
        )
    if context.recipe.engine.compiles_steps and not backend.runs_step_programs:
        yield (
            "engine.program",
            f"is step, but Paddle 3.3.1 cannot run the program of a full step on {backend.name}; set it to layers",
        )


STRATEGY_RULES = (
    Rule(
        "degrees whose product does not divide the devices",
        "the ranks form no grid",
        ("--parallel.pipeline_parallel_degree=3",),
        _no_grid,
    ),
    Rule(
        "a tensor parallel degree that does not divide heads, key-value heads, MLP width or experts",
        "a matrix would be sharded unevenly",
        ("--parallel.tensor_parallel_degree=16", "--launch.num_devices=64"),
        _uneven_shards,
    ),
    Rule(
        "`offload_optimizer` with `optimizer: adamw_8bit`",
        "ranks exchange the scales of all moments in one call, so they are on the device together",
        ("--train.optimizer=adamw_8bit", "--engine.offload_optimizer=true"),
        _blocks_on_the_host,
    ),
    Rule(
        "`master_weights: false` with fp32 or fp16, on a device that keeps parameters in float32 (cpu), or with "
        "`offload_optimizer`",
        "parameters have no copies, and are updated where they are; small second moments are 0 in fp16",
        ("--train.master_weights=false", "--engine.precision=fp16"),
        _no_masters,
    ),
    Rule(
        "a pipeline, stage 3, recompute or `to_static` with a family without a shard plan",
        "its layers are not named",
        (),
        _no_shard_plan,
    ),
    Rule(
        "more pipeline stages, or chunks in total, than layers",
        "a part would be empty",
        ("--parallel.pipeline_parallel_degree=64", "--launch.num_devices=256"),
        _empty_part,
    ),
    Rule(
        "a list in `pipeline_cut` that does not fit the number of parts, or names a layer the model does not have",
        "the list names the first layer of each part but the first",
        ("--parallel.pipeline_cut=[8,16]",),
        _wrong_cut,
    ),
    Rule(
        "sharding with one data rank",
        "there are no ranks to shard over",
        ("--launch.num_devices=4",),
        _nothing_to_shard,
    ),
    Rule(
        "`fuse_projections` with `to_static`, adapters, interventions or `qat`",
        "compiled layers do this in any case; the others compute more than a plain matrix product",
        ("--parallel.fuse_projections=true", "--engine.mode=to_static"),
        _not_to_be_fused,
    ),
    Rule(
        "expert parallel with a family that has no routed experts",
        "there is nothing to distribute",
        ("--parallel.expert_parallel_degree=2",),
        _no_experts,
    ),
    Rule(
        "an expert parallel degree that does not divide the data ranks, or, with tensor parallel, the experts",
        "ranks would have different numbers of experts, or no ranks to distribute them over",
        (
            "--model.family=deepseek",
            "--model.preset=deepseek-v2-lite",
            "--parallel.expert_parallel_degree=4",
        ),
        _uneven_experts,
    ),
    Rule(
        "keys that balance experts with a family without experts, or without their bias, or with adapters",
        "there is nothing to balance",
        ("--train.expert_bias_rate=0.001",),
        _no_balance,
    ),
    Rule(
        "a global batch that is not a multiple of micro-batch x data ranks",
        "ranks would see different numbers of samples",
        ("--train.global_batch_size=63",),
        _uneven_batch,
    ),
    Rule(
        "sequences longer than the model's positions",
        "the model has no more positions",
        ("--data.max_length=200000",),
        _too_long,
    ),
    Rule(
        "a precision that the device does not support",
        "the cpu has no fp16, and bf16 only for training",
        ("--device=cpu", "--engine.precision=fp16"),
        _no_such_precision,
    ),
    Rule(
        "`to_static` of layers with bf16 on cpu and tensor parallel",
        "its matrix products are custom operations on the shard of a rank, which have no gradient in a program of "
        "`paddle.jit.to_static` (Paddle 3.3.1)",
        ("--device=cpu", "--engine.precision=bf16", "--engine.mode=to_static"),
        _not_in_programs,
    ),
    Rule(
        "`pipeline_schedule: interleaved` on xpu, and that or `program: step` with a pipeline on plugin devices that "
        "do not declare support",
        "the ranks of a pipeline would deadlock; 1F1B, FThenB and compiled layers give the same numbers",
        ("--device=xpu", "--parallel.pipeline_schedule=interleaved"),
        _would_hang,
    ),
    Rule(
        "tensor parallelism in fp32, or `program: step`, on [accelerators of vendors](../guide/devices.md)",
        "Paddle 3.3.1 adds gradients of distributed tensors, and runs such programs, on cpu, gpu and xpu only",
        ("--device=npu", "--engine.precision=fp32"),
        _not_on_this_device,
    ),
)
"""Rules between sections, the model shape and the device."""

GENERAL_RULES = tuple(rule for rule in STRATEGY_RULES if rule.check in (_no_grid, _uneven_shards, _no_such_precision))
"""Rules that also apply to stages that do not train."""
