"""Rules about compiled training steps (`engine.program: step`): features that they do not support."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.degrees import accumulate_steps
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.recipe.rules.context import RuleContext


def _not_in_a_step(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if not recipe.engine.compiles_steps:
        return
    engine = recipe.engine
    train = recipe.train
    parallel = recipe.parallel
    stage = context.stage
    if "step_programs" not in stage.capabilities:
        yield "engine.program", f"is step, which stage {recipe.stage} does not support; set it to layers"
    elif context.profile.entropy:
        message = "is set, but a compiled step computes no entropies; set it to 0, or engine.program to layers"
        yield f"{stage.section_name}.entropy_coef", message
    if parallel.sharding != "none" and context.degrees.dp > 1:
        message = f"is {context.degrees.sharding}, but engine.program step shards over all data ranks"
        yield "parallel.sharding_parallel_degree", f"{message}; remove it, or set engine.program to layers"
    unsupported = "which engine.program step does not support"
    by_parts = "but a compiled step updates all parameters with the full optimizer state on the device"
    alone = "but a compiled step reduces each gradient separately"
    buckets = parallel.gradient_bucket_bytes
    chunk = engine.loss_chunk_tokens
    ragged = "but micro-batches with varying numbers of rows would need a new program for each step"
    for key, value, is_set, default, why in (
        ("engine.offload_optimizer", "true", engine.offload_optimizer, "false", by_parts),
        ("train.optimizer", "adamw_8bit", train.optimizer == "adamw_8bit", "adamw", unsupported),
        ("train.master_weights", "false", not train.master_weights, "true", unsupported),
        ("lora.share_first", "true", recipe.lora.share_first, "false", unsupported),
        ("train.mtp_loss_weight", train.mtp_loss_weight, train.mtp_loss_weight > 0, "0", unsupported),
        ("engine.loss_chunk_tokens", chunk, chunk is not None, "null", unsupported),
        ("train.micro_batch_tokens", train.micro_batch_tokens, train.micro_batch_tokens is not None, "null", ragged),
        ("parallel.gradient_bucket_bytes", buckets, buckets is not None, "null", alone),
    ):
        if is_set:
            yield key, f"is {value}, {why}; set it to {default}, or engine.program to layers"


def _not_with_experts(context: RuleContext) -> Iterator[Violation]:
    if not context.recipe.engine.compiles_steps or not context.shard_plan.experts:
        return
    parallel = context.recipe.parallel
    num_data_ranks = context.degrees.num_data_ranks
    if parallel.expert_parallel_degree not in (1, num_data_ranks):
        message = f"is {parallel.expert_parallel_degree}, but engine.program step distributes experts over all"
        advice = f"{num_data_ranks} data ranks; set it to {num_data_ranks} or 1, or engine.program to layers"
        yield "parallel.expert_parallel_degree", f"{message} {advice}"


def _not_with_linear_attention(context: RuleContext) -> Iterator[Violation]:
    engine = context.recipe.engine
    shape_spec = context.family.shape_spec
    if context.config is None or shape_spec is None or not shape_spec(context.config).has_states:
        return
    has = f"but the family {context.family.name} has linear attention, which"
    if engine.compiles_steps:
        yield "engine.program", f"is step, {has} no program of a full step computes; set it to layers"
    elif engine.compiles_layers and context.recipe.parallel.tensor_parallel_degree > 1:
        yield "engine.mode", f"is to_static, {has} has no gradients in a program with tensor parallelism; use dynamic"


def _not_in_a_pipeline(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    parallel = context.recipe.parallel
    train = context.recipe.train
    stages = parallel.pipeline_parallel_degree
    if not recipe.engine.compiles_steps or stages == 1:
        return
    pipelines = "pipelines of engine.program step"
    or_layers = "or engine.program to layers"
    if train.micro_batch_size == 1:
        yield "train.micro_batch_size", f"is 1, but {pipelines} need 2 rows or more; set it to 2, {or_layers}"
    count = accumulate_steps(train, context.degrees)
    if recipe.prefix.tokens is not None and recipe.prefix.projection:
        yield "prefix.projection", f"is true, but {pipelines} cannot share its network between stages; set it to false"
    if count is None:
        return
    plural = "" if count == 1 else "es"
    found = f"is {train.global_batch_size}, which is {count} micro-batch{plural} on each data rank"
    if count < stages:
        yield (
            "train.global_batch_size",
            f"{found}; {pipelines} need {stages} or more: raise it, or lower train.micro_batch_size",
        )
    elif parallel.pipeline_schedule == "interleaved" and count % stages:
        yield (
            "train.global_batch_size",
            f"{found}; interleaved {pipelines} need a multiple of {stages}: change it or train.micro_batch_size, or "
            "set parallel.pipeline_schedule to 1F1B",
        )


PROGRAM_RULES = (
    Rule(
        "`program: step` with sharding over some of the data ranks, a stage that does not support it, "
        "`entropy_coef`, `offload_optimizer`, `optimizer: adamw_8bit`, `master_weights: false`, "
        "`mtp_loss_weight`, `loss_chunk_tokens`, `micro_batch_tokens` or `gradient_bucket_bytes`",
        "a compiled step does not support it: the optimizer state stays on the device, all batches have one shape, and "
        "each gradient is reduced separately",
        (
            "--engine.mode=to_static",
            "--engine.program=step",
            "--parallel={}",
            "--launch.num_devices=1",
            "--engine.recompute=none",
            "--engine.precision=fp32",
            "--engine.offload_optimizer=true",
        ),
        _not_in_a_step,
    ),
    Rule(
        "`program: step` with `expert_parallel_degree` over some of the data ranks",
        "the mesh of a compiled step has one axis for all data ranks",
        (),
        _not_with_experts,
    ),
    Rule(
        "linear attention with `program: step`, or with `to_static` and tensor parallelism",
        "each rank computes it on the heads that it has, and Paddle 3.3.1 has no gradient of that in a program",
        (),
        _not_with_linear_attention,
    ),
    Rule(
        "`program: step` with a pipeline and `prefix.projection`, `micro_batch_size: 1`, with fewer micro-batches than "
        "stages, or with the schedule `interleaved` and a number of micro-batches that the stages do not divide",
        "Paddle 3.3.1 cannot compile it; with such a number of micro-batches, stages would confuse gradients with "
        "activations",
        (),
        _not_in_a_pipeline,
    ),
)
"""Rules about `engine.program: step`."""
