"""Rules about whole training steps as programs: what these do not have yet."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.degrees import accumulate_steps
from llmsuite.schema.rule import Rule, Violation


def _not_in_a_step(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if not recipe.engine.compiles_steps:
        return
    engine, train, parallel = recipe.engine, recipe.train, recipe.parallel
    if not context.stage.in_programs:
        yield "engine.program", f"is step, which stage {recipe.stage} does not have; set it to layers"
    if parallel.sharding != "none" and context.degrees.dp > 1:
        shared = f"is {context.degrees.sharding}, and programs of engine.program step shard over all data ranks"
        yield "parallel.sharding_parallel_degree", f"{shared}; leave it out, or set engine.program to layers"
    missing = "which engine.program step does not have"
    by_parts = "and a program updates all parameters at once, with all of the optimizer's state on the device"
    alone = "and a program sums the gradient of each parameter by itself"
    buckets = parallel.gradient_bucket_bytes
    chunk = engine.loss_chunk_tokens
    ragged = "and micro-batches of as many tokens differ in their rows, so each step would need a program of its own"
    for key, value, is_set, default, why in (
        ("engine.offload_optimizer", "true", engine.offload_optimizer, "false", by_parts),
        ("train.mtp_loss_weight", train.mtp_loss_weight, train.mtp_loss_weight > 0, "0", missing),
        ("engine.loss_chunk_tokens", chunk, chunk is not None, "null", missing),
        ("train.micro_batch_tokens", train.micro_batch_tokens, train.micro_batch_tokens is not None, "null", ragged),
        ("parallel.gradient_bucket_bytes", buckets, buckets is not None, "null", alone),
    ):
        if is_set:
            yield key, f"is {value}, {why}; set it to {default}, or engine.program to layers"


def _not_with_experts(context: RuleContext) -> Iterator[Violation]:
    if not context.recipe.engine.compiles_steps or not context.shard_plan.experts:
        return
    parallel, num_data_ranks = context.recipe.parallel, context.degrees.num_data_ranks
    if parallel.expert_parallel_degree not in (1, num_data_ranks):
        message = f"is {parallel.expert_parallel_degree}, and programs of engine.program step share experts out over"
        advice = f"all data ranks, {num_data_ranks}; set it to {num_data_ranks} or 1, or engine.program to layers"
        yield "parallel.expert_parallel_degree", f"{message} {advice}"


def _not_in_a_pipeline(context: RuleContext) -> Iterator[Violation]:
    recipe, parallel, train = context.recipe, context.recipe.parallel, context.recipe.train
    stages = parallel.pipeline_parallel_degree
    if not recipe.engine.compiles_steps or stages == 1:
        return
    pipelines, or_layers = "pipelines of engine.program step", "or engine.program to layers"
    if train.micro_batch_size == 1:
        yield "train.micro_batch_size", f"is 1, and {pipelines} take 2 rows or more; set it to 2, {or_layers}"
    count = accumulate_steps(train, context.degrees)
    if recipe.prefix.tokens is not None and recipe.prefix.projection:
        yield "prefix.projection", f"is true, whose network all stages share, which {pipelines} cannot; set it to false"
    if count is None:
        return
    found = f"is {train.global_batch_size}, of which a data rank makes {count} micro-batch{'' if count == 1 else 'es'}"
    if count < stages:
        yield (
            "train.global_batch_size",
            f"{found}; {pipelines} take {stages} or more: raise it, or lower train.micro_batch_size",
        )
    elif parallel.pipeline_schedule == "interleaved" and count % stages:
        yield (
            "train.global_batch_size",
            f"{found}; interleaved {pipelines} take a multiple of {stages}: change it or train.micro_batch_size, or "
            "set parallel.pipeline_schedule to 1F1B",
        )


PROGRAM_RULES = (
    Rule(
        "`program: step` with sharding over some of the data ranks, another stage than `pretrain`, "
        "`sft`, `lora`, `dpo`, `kto` and `rm`, `offload_optimizer`, `mtp_loss_weight`, "
        "`loss_chunk_tokens`, `micro_batch_tokens` or `gradient_bucket_bytes`",
        "such a program does not have it yet; it moves no state of the optimizer, is made for one shape of batches, "
        "and sums each gradient by itself",
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
        "data ranks are one axis of the mesh of a program",
        (),
        _not_with_experts,
    ),
    Rule(
        "`program: step` with a pipeline and `prefix.projection`, `micro_batch_size: 1`, with fewer micro-batches than "
        "stages, or with the schedule `interleaved` and a number of micro-batches that the stages do not divide",
        "Paddle 3.3.1 has no program for it; with such a number of micro-batches, stages would take gradients for "
        "activations",
        (),
        _not_in_a_pipeline,
    ),
)
"""Rules about `engine.program: step`."""
