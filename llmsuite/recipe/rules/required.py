"""Rules about keys that other keys require."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.contract.schema.section import value_at
from llmsuite.models.plain import reads_tokens
from llmsuite.recipe.rules.context import RuleContext

_REQUIRED_BY_REWARDS = {
    "format": ("pattern", "a regular expression"),
    "length": ("target", "a number of tokens"),
    "http": ("url", "the address of the server"),
    "model": ("weights", "the directory of a run of stage rm"),
}
"""Reward -> its required key, and a description of the value."""


def _no_tokenizer(context: RuleContext) -> Iterator[Violation]:
    model = context.recipe.model
    # a config with problems is reported elsewhere; the family may not read tokens
    known = context.config is not None and reads_tokens(context.config)
    if known and model.weights is None and model.tokenizer is None:
        message = "is required without model.weights; add --model.tokenizer=DIR_OR_NAME, with a tokenizer.json"
        yield "model.tokenizer", message


def _incomplete_reward(context: RuleContext) -> Iterator[Violation]:
    if context.reward is None:
        return
    for name in context.reward.functions:
        key, what = _REQUIRED_BY_REWARDS.get(name, ("", ""))
        if key and value_at(context.reward, name, key) is None:
            yield f"reward.{name}.{key}", f"is required with the reward {name}; set it to {what}"


def _unnamed_environment(context: RuleContext) -> Iterator[Violation]:
    environment = context.environment
    if environment is None or environment.name != "verifiers":
        return
    if value_at(environment, "verifiers").id is None:
        what = "the name of its package, or a Python file with load_environment"
        yield "environment.verifiers.id", f"is required with the environment verifiers; set it to {what}"


REQUIRED_RULES = (
    Rule(
        "a model that reads tokens with neither `model.weights` nor `model.tokenizer`",
        "there is no tokenizer",
        ("--model.weights=null",),
        _no_tokenizer,
    ),
    Rule(
        "the reward `format` without `pattern`, `length` without `target`, `http` without `url`, or `model` without "
        "`weights`",
        "the reward cannot be computed",
        (),
        _incomplete_reward,
    ),
    Rule("the environment `verifiers` without `id`", "the environment is not named", (), _unnamed_environment),
)
"""Rules about keys that other keys require."""

INFERENCE_REQUIRED_RULES = REQUIRED_RULES[:1]
"""Required keys of stages that do not train."""
