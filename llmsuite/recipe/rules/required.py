"""Rules about keys that others make necessary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmsuite.models.plain import reads_tokens
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.reward import RewardSection
from llmsuite.schema.rule import Rule, Violation

_OF_REWARDS = {
    "format": ("pattern", "a regular expression"),
    "length": ("target", "a number of tokens"),
    "http": ("url", "where the server listens"),
    "model": ("weights", "the directory of a run of stage rm"),
}
"""By reward the key that it cannot do without, and what that is set to."""


def _no_tokenizer(context: RuleContext) -> Iterator[Violation]:
    model = context.recipe.model
    # a shape with problems of its own may turn out to be of a family that reads no tokens
    known = context.config is not None and reads_tokens(context.config)
    if known and model.weights is None and model.tokenizer is None:
        message = "is required without model.weights; add --model.tokenizer=DIR_OR_NAME, with a tokenizer.json"
        yield "model.tokenizer", message


def _incomplete_reward(context: RuleContext) -> Iterator[Violation]:
    rewards: Any = getattr(context.recipe, "reward", None)  # with the keys of its rewards
    for name in rewards.functions if isinstance(rewards, RewardSection) else ():
        key, what = _OF_REWARDS.get(name, ("", ""))
        if key and getattr(getattr(rewards, name), key) is None:
            yield f"reward.{name}.{key}", f"is required with the reward {name}; set it to {what}"


def _unnamed_environment(context: RuleContext) -> Iterator[Violation]:
    environment: Any = getattr(context.recipe, "environment", None)  # with the keys of its environments
    if getattr(environment, "name", None) == "verifiers" and environment.verifiers.id is None:
        what = "the name of its package, or a Python file with load_environment"
        yield "environment.verifiers.id", f"is required with the environment verifiers; set it to {what}"


REQUIRED_RULES = (
    Rule(
        "a model that reads tokens with neither `model.weights` nor `model.tokenizer`",
        "nothing says what its tokens are",
        ("--model.weights=null",),
        _no_tokenizer,
    ),
    Rule(
        "the reward `format` without `pattern`, `length` without `target`, `http` without `url`, or `model` without "
        "`weights`",
        "it has nothing to reward by",
        (),
        _incomplete_reward,
    ),
    Rule("the environment `verifiers` without `id`", "nothing says which to play", (), _unnamed_environment),
)
"""Rules about keys that others make necessary."""

UNTRAINED_REQUIRED_RULES = REQUIRED_RULES[:1]
"""Those of them for a stage that does not train."""
