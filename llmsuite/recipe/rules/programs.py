"""Rules about whole training steps as programs: what these do not have yet."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation


def _not_in_a_step(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    if not recipe.engine.compiles_steps:
        return
    engine, train, parallel = recipe.engine, recipe.train, recipe.parallel
    if not context.stage.in_programs:
        yield "engine.program", f"is step, which stage {recipe.stage} does not have; set it to layers"
    if context.shard_plan.experts:
        yield "engine.program", f"is step, which cannot route tokens (family {context.family.name}); set it to layers"
    if (degree := parallel.pipeline_parallel_degree) > 1:
        message = f"is {degree}, and programs of engine.program step have no pipeline yet"
        yield "parallel.pipeline_parallel_degree", f"{message}; set it to 1, or engine.program to layers"
    if parallel.sharding != "none" and context.degrees.dp > 1:
        shared = f"is {context.degrees.sharding}, and programs of engine.program step shard over all data ranks"
        yield "parallel.sharding_parallel_degree", f"{shared}; leave it out, or set engine.program to layers"
    for key, value, is_set, default in (
        ("engine.precision", engine.precision, engine.precision != "fp32", "fp32"),
        ("engine.recompute", engine.recompute, engine.recompute != "none", "none"),
        ("engine.offload_optimizer", "true", engine.offload_optimizer, "false"),
        ("lora.rank", recipe.lora.rank, recipe.lora.rank is not None, "null"),
        ("reft.rank", recipe.reft.rank, recipe.reft.rank is not None, "null"),
        ("prefix.tokens", recipe.prefix.tokens, recipe.prefix.tokens is not None, "null"),
        ("qat.weight_bits", recipe.qat.weight_bits, recipe.qat.weight_bits is not None, "null"),
        ("train.mtp_loss_weight", train.mtp_loss_weight, train.mtp_loss_weight > 0, "0"),
        ("train.micro_batch_tokens", train.micro_batch_tokens, train.micro_batch_tokens is not None, "null"),
    ):
        if is_set:
            message = "which engine.program step does not have"
            yield key, f"is {value}, {message}; set it to {default}, or engine.program to layers"


def _not_skipped(context: RuleContext) -> Iterator[Violation]:
    train = context.recipe.train
    if not context.recipe.engine.compiles_steps:
        return
    for key, applies in (("on_nonfinite", True), ("on_spike", train.spike_factor is not None)):
        if applies and getattr(train, key) == "skip":
            yield (
                f"train.{key}",
                "is skip, and with engine.program step the update is over before the step is judged; set it to stop or "
                "roll_back, or engine.program to layers",
            )


PROGRAM_RULES = (
    Rule(
        "`program: step` with pipeline parallel, sharding over some of the data ranks, another stage than "
        "`pretrain` and `sft`, experts, `recompute`, `offload_optimizer`, another precision than fp32, `lora`, `reft`, "
        "`prefix`, `qat`, `mtp_loss_weight` or `micro_batch_tokens`",
        "such a program does not have it yet",
        (
            "--engine.mode=to_static",
            "--engine.program=step",
            "--parallel={}",
            "--launch.num_devices=1",
            "--engine.recompute=none",
            "--engine.precision=fp32",
        ),
        _not_in_a_step,
    ),
    Rule(
        "`program: step` with `on_nonfinite: skip`, or with `spike_factor` and `on_spike: skip`",
        "the program updates the parameters before anybody has seen the gradient",
        (),
        _not_skipped,
    ),
)
"""Rules about `engine.program: step`."""
