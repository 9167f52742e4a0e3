"""Rules about generation at evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.recipe.rules.context import RuleContext


def _other_stage(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    key = "generation.max_new_tokens"
    longest = recipe.generation.max_new_tokens
    if longest is None:
        return
    if "generation" not in context.stage.capabilities:
        yield key, f"is {longest}; stage {recipe.stage} has no answers to compare with: use sft, or set it to null"
    elif not context.evaluates:
        yield key, f"is {longest}, but there is no evaluation data; set data.eval or data.holdout, or set it to null"
    elif longest >= recipe.data.max_length:
        yield (
            key,
            f"is {longest}, which leaves no room for a prompt in data.max_length {recipe.data.max_length}; lower it, "
            "or raise that",
        )


def _unsupported_weights(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    key = "generation.max_new_tokens"
    longest = recipe.generation.max_new_tokens
    if longest is None:
        return
    for other, is_set in (
        ("lora.base_dtype", recipe.lora.rank is not None and recipe.lora.base_dtype is not None),
        ("reft.rank", recipe.reft.rank is not None),
        ("prefix.tokens", recipe.prefix.tokens is not None),
        ("qat.weight_bits", recipe.qat.weight_bits is not None),
        ("train.mtp_loss_weight", recipe.train.mtp_loss_weight > 0),
    ):
        if is_set:
            message = f"is {longest}, but generation at evaluations does not support {other}"
            yield key, f"{message}; set one of the two to null or 0"


GENERATION_RULES = (
    Rule(
        "`generation.max_new_tokens` with another stage than `sft`, `lora`, `dpo` and `pretrain`, without `data.eval`, "
        "or with no room",
        "generation needs a prompt, and a reference answer to compare with",
        ("--generation.max_new_tokens=4096",),
        _other_stage,
    ),
    Rule(
        "`generation.max_new_tokens` with `base_dtype`, `reft`, `prefix`, `qat` or `mtp_loss_weight`",
        "the generating model has plain matrices with merged adapters only",
        (),
        _unsupported_weights,
    ),
)
"""Rules about section `generation`."""
