"""Rules about models that place their parameters themselves: what the engine cannot do beside that."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation


def _own_meshes(context: RuleContext) -> Iterator[Violation]:
    parallel = context.recipe.parallel
    if not context.shard_plan.is_annotated:
        return
    why = f"family {context.family.name} places its parameters on meshes of its own"
    for key in ("tensor", "pipeline", "sharding", "expert"):
        degree = getattr(parallel, f"{key}_parallel_degree")
        if degree > 1:
            yield f"parallel.{key}_parallel_degree", f"is {degree}, and {why}, which say how; remove it"
    if parallel.sharding != "none":
        yield (
            "parallel.sharding",
            f"is {parallel.sharding}, and {why}: what lies there is updated there; set it to none, and cut parameters "
            "along a further axis of the mesh",
        )


def _not_beside_own_meshes(context: RuleContext) -> Iterator[Violation]:
    recipe, parallel, train = context.recipe, context.recipe.parallel, context.recipe.train
    if not context.shard_plan.is_annotated:
        return
    engine, what = recipe.engine, f"which family {context.family.name}, with meshes of its own, does not have"
    for key, value, is_set, instead in (
        ("parallel.sequence_parallel", "true", parallel.sequence_parallel, "false"),
        ("parallel.fuse_projections", "true", parallel.fuse_projections, "false"),
        ("engine.recompute", engine.recompute, engine.recompute != "none", "none"),
        ("engine.loss_chunk_tokens", engine.loss_chunk_tokens, engine.loss_chunk_tokens is not None, "null"),
        ("engine.precision", engine.precision, engine.precision != "fp32", "fp32"),
        ("engine.offload_optimizer", "true", engine.offload_optimizer, "false"),
        ("lora.rank", recipe.lora.rank, recipe.lora.rank is not None, "null"),
        ("reft.rank", recipe.reft.rank, recipe.reft.rank is not None, "null"),
        ("prefix.tokens", recipe.prefix.tokens, recipe.prefix.tokens is not None, "null"),
        ("qat.weight_bits", recipe.qat.weight_bits, recipe.qat.weight_bits is not None, "null"),
        ("generation.max_new_tokens", recipe.generation.max_new_tokens, recipe.generation.max_new_tokens, "null"),
        ("train.mtp_loss_weight", train.mtp_loss_weight, train.mtp_loss_weight > 0, "0"),
    ):
        if is_set:
            yield key, f"is {value}, {what}; set it to {instead}"
    if engine.compiles_layers:
        yield (
            "engine.program",
            f"is {engine.program}, and a shard plan would name the layers; family {context.family.name} has none; set "
            "it to step, or engine.mode to dynamic",
        )
    profile = context.stage.profile(getattr(recipe, context.stage.section_name))
    if profile.updates:
        yield "stage", f"is {recipe.stage}, which generates, {what}; choose a stage without rollouts"


def _not_trained(context: RuleContext) -> Iterator[Violation]:
    if context.shard_plan.is_annotated:
        message = f"is {context.family.name}, whose models have meshes of their own: they are only trained"
        yield "model.family", f"{message}; choose another family"


ANNOTATED_RULES = (
    Rule(
        "degrees or sharding with a family that places its parameters on meshes of its own",
        "the meshes of the model are the strategy",
        (),
        _own_meshes,
    ),
    Rule(
        "`program: layers`, `recompute`, `loss_chunk_tokens`, 16 bits, `offload_optimizer`, `lora`, `reft`, `prefix`, "
        "`qat`, `mtp_loss_weight`, `sequence_parallel`, `fuse_projections`, generation or rollouts with such a family",
        "they change layers that the engine knows, and it knows none of these",
        (),
        _not_beside_own_meshes,
    ),
)
"""Rules about `llmsuite.models.shard_plan.ANNOTATED`."""

UNTRAINED_ANNOTATED_RULES = (
    Rule(
        "a stage that does not train with such a family",
        "it calls layers that the engine knows",
        (),
        _not_trained,
    ),
)
"""Those of a stage that does not train."""
