"""Rules about stages with a critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file
from llmsuite.contract.schema.recipe import rollout_of
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.models.protocols import HasScoreHead, KeepsKeys
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.shape import ONLY_INITIAL, local_weights


def _no_score_head(context: RuleContext) -> Iterator[Violation]:
    if (
        context.profile.critic is not None
        and context.config is not None
        and not isinstance(context.config, HasScoreHead)
    ):
        message = f"{context.family.name} has no score head, which the critic of stage {context.recipe.stage} needs"
        yield "model.family", f"{message}; choose another family"


def _one_loss_scale(context: RuleContext) -> Iterator[Violation]:
    if context.profile.critic is not None and context.recipe.engine.precision == "fp16":
        message = "is fp16, whose loss scale is for one model, but the critic is a second one"
        yield "engine.precision", f"{message}; choose bf16"


def _other_shape(context: RuleContext) -> Iterator[Violation]:
    critic = context.profile.critic
    if (
        critic is None
        or critic.weights is None
        or context.config is None
        or not isinstance(context.config, HasScoreHead)
    ):
        return
    key = f"{critic.key}.weights"
    directory = local_weights(critic.weights)
    if not is_file(directory / "config.json"):  # `RunPlan.check_files` reports it
        return
    from llmsuite.checkpoint.model_dir import read_config

    try:
        _, found = read_config(directory, {context.family.name: context.family})
    except UserError as error:
        yield key, str(error)
        return
    kept = None
    if isinstance(context.config, KeepsKeys):
        kept = context.config.kept
    there, here = (_plain(config, kept) for config in (found, context.config))
    differing = [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} in the model"
        for name in sorted(there.keys() | here.keys())
        if name not in ONLY_INITIAL and there.get(name) != here.get(name)
    ]
    if differing:
        yield key, f"{directory} has another shape than the trained model: {'; '.join(differing)}"


def _plain(config: Any, kept: Any) -> dict[str, Any]:
    """Return a config as the config.json of a critic, with all defaults."""
    changes: dict[str, Any] = {"head": "score"}
    if isinstance(config, KeepsKeys):
        changes["kept"] = kept
    plain: dict[str, Any] = dataclasses.replace(config, **changes).to_hf()
    return plain


def _biased_prompts(context: RuleContext) -> Iterator[Violation]:
    rollout = rollout_of(context.recipe)
    stage = context.recipe.stage
    if context.profile.critic is not None and rollout is not None and rollout.dynamic_sampling:
        message = (
            f"drops prompts whose completions have equal rewards: the critic of stage {stage} would never see prompts "
            "that are always right or always wrong, and its values would be biased"
        )
        yield "rollout.dynamic_sampling", f"{message}; set it to false"


CRITIC_RULES = (
    Rule("a critic of a family without a score head", "a critic predicts one value per token", (), _no_score_head),
    Rule("a critic of another shape", "it is sharded like the model", (), _other_shape),
    Rule("a critic with `fp16`", "loss scaling supports one model only", (), _one_loss_scale),
    Rule(
        "a critic with `rollout.dynamic_sampling`",
        "it would never see prompts that are always right or always wrong",
        (),
        _biased_prompts,
    ),
)
"""Rules between sections, for stages with a critic."""
