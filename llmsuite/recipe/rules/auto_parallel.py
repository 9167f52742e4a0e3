"""Rules about auto-parallel families, whose models place their parameters themselves on their own meshes."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.recipe.rules.context import RuleContext


def _degrees_of_engine(context: RuleContext) -> Iterator[Violation]:
    parallel = context.recipe.parallel
    if not context.shard_plan.is_auto_parallel:
        return
    why = f"family {context.family.name} is auto-parallel and places its parameters itself"
    degrees = {
        "tensor": parallel.tensor_parallel_degree,
        "pipeline": parallel.pipeline_parallel_degree,
        "sharding": parallel.sharding_parallel_degree,
        "expert": parallel.expert_parallel_degree,
    }
    for key, degree in degrees.items():
        if degree > 1:
            yield f"parallel.{key}_parallel_degree", f"is {degree}, but {why}; remove it"
    if parallel.sharding != "none":
        yield (
            "parallel.sharding",
            f"is {parallel.sharding}, but {why}; set it to none, and shard parameters along another axis of the "
            "model's mesh",
        )


def _unsupported_features(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    parallel = context.recipe.parallel
    train = context.recipe.train
    if not context.shard_plan.is_auto_parallel:
        return
    engine = recipe.engine
    reason = f"which the auto-parallel family {context.family.name} does not support"
    for key, value, is_set, instead in (
        ("parallel.sequence_parallel", "true", parallel.sequence_parallel, "false"),
        ("parallel.fuse_projections", "true", parallel.fuse_projections, "false"),
        (
            "parallel.gradient_bucket_bytes",
            parallel.gradient_bucket_bytes,
            parallel.gradient_bucket_bytes is not None and not engine.compiles_steps,
            "null",
        ),
        ("engine.recompute", engine.recompute, engine.recompute != "none", "none"),
        ("engine.loss_chunk_tokens", engine.loss_chunk_tokens, engine.loss_chunk_tokens is not None, "null"),
        ("engine.precision", engine.precision, engine.precision != "fp32", "fp32"),
        ("engine.offload_optimizer", "true", engine.offload_optimizer, "false"),
        ("train.optimizer", "adamw_8bit", train.optimizer == "adamw_8bit", "adamw"),
        ("lora.rank", recipe.lora.rank, recipe.lora.rank is not None, "null"),
        ("reft.rank", recipe.reft.rank, recipe.reft.rank is not None, "null"),
        ("prefix.tokens", recipe.prefix.tokens, recipe.prefix.tokens is not None, "null"),
        ("qat.weight_bits", recipe.qat.weight_bits, recipe.qat.weight_bits is not None, "null"),
        ("generation.max_new_tokens", recipe.generation.max_new_tokens, recipe.generation.max_new_tokens, "null"),
        ("train.mtp_loss_weight", train.mtp_loss_weight, train.mtp_loss_weight > 0, "0"),
    ):
        if is_set:
            yield key, f"is {value}, {reason}; set it to {instead}"
    if engine.compiles_layers:
        yield (
            "engine.program",
            f"is {engine.program}, but the shard plan of the auto-parallel family {context.family.name} names no "
            "layers to compile; set it to step, or engine.mode to dynamic",
        )
    if context.profile.updates:
        yield "stage", f"is {recipe.stage}, which has rollouts, {reason}; choose a stage without rollouts"


def _not_trained(context: RuleContext) -> Iterator[Violation]:
    if context.shard_plan.is_auto_parallel:
        message = f"is {context.family.name}, an auto-parallel family, which supports training only"
        yield "model.family", f"{message}; choose another family"


AUTO_PARALLEL_RULES = (
    Rule(
        "degrees or sharding with an auto-parallel family",
        "the model places its parameters itself, on its own meshes",
        (),
        _degrees_of_engine,
    ),
    Rule(
        "`program: layers`, `recompute`, `loss_chunk_tokens`, 16 bits, `offload_optimizer`, `adamw_8bit`, "
        "`lora`, `reft`, `prefix`, `qat`, `mtp_loss_weight`, `sequence_parallel`, `fuse_projections`, "
        "`gradient_bucket_bytes`, generation or rollouts with an auto-parallel family",
        "they need layers that the engine knows; it does not know those of such a model",
        (),
        _unsupported_features,
    ),
)
"""Rules about families with the shard plan `AUTO_PARALLEL`."""

INFERENCE_AUTO_PARALLEL_RULES = (
    Rule(
        "a stage that does not train with an auto-parallel family",
        "inference needs layers that the engine knows",
        (),
        _not_trained,
    ),
)
"""Rules about auto-parallel families for stages that do not train."""
