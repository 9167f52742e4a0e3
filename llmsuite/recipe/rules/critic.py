"""Rules about stages with a critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from llmsuite.errors import UserError
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.recipe.shape import ONLY_INITIAL, local_weights
from llmsuite.regular import is_file
from llmsuite.schema.rule import Rule, Violation
from llmsuite.specs import CriticProfile


def _critic(context: RuleContext) -> CriticProfile | None:
    if not context.stage.trains:
        return None
    return context.stage.profile(getattr(context.recipe, context.stage.section_name)).critic


def _no_score_head(context: RuleContext) -> Iterator[Violation]:
    if _critic(context) is not None and context.config is not None and not hasattr(context.config, "head"):
        message = f"{context.family.name} has no score head, which the critic of stage {context.recipe.stage} needs"
        yield "model.family", f"{message}; choose another family"


def _one_loss_scale(context: RuleContext) -> Iterator[Violation]:
    if _critic(context) is not None and context.recipe.engine.precision == "fp16":
        message = "is fp16, whose loss scale is for one model, and there is a critic beside it"
        yield "engine.precision", f"{message}; choose bf16"


def _other_shape(context: RuleContext) -> Iterator[Violation]:
    critic = _critic(context)
    if critic is None or critic.weights is None or context.config is None or not hasattr(context.config, "head"):
        return
    key, place = f"{critic.key}.weights", local_weights(critic.weights)
    if not is_file(place / "config.json"):  # `RunPlan.check_files` asks for it
        return
    from llmsuite.checkpoint.model_dir import read_config

    try:
        _, found = read_config(place, {context.family.name: context.family})
    except UserError as error:
        yield key, str(error)
        return
    there, here = (_plain(config, kept=getattr(context.config, "kept", None)) for config in (found, context.config))
    differing = [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} in the model"
        for name in sorted(there.keys() | here.keys())
        if name not in ONLY_INITIAL and there.get(name) != here.get(name)
    ]
    if differing:
        yield key, f"{place} has another shape than the model that is trained: {'; '.join(differing)}"


def _plain(config: Any, kept: Any) -> dict[str, Any]:
    """A config as config.json would have it of a critic, where defaults are written out."""
    other = {"kept": kept} if hasattr(config, "kept") else {}
    plain: dict[str, Any] = dataclasses.replace(config, head="score", **other).to_hf()
    return plain


def _chosen_prompts(context: RuleContext) -> Iterator[Violation]:
    rollout, stage = getattr(context.recipe, "rollout", None), context.recipe.stage
    if _critic(context) is not None and getattr(rollout, "dynamic_sampling", False):
        message = (
            f"leaves out prompts whose completions have equal rewards: the critic of stage {stage} would never see "
            "what is always right or always wrong, and expect too little or too much of it"
        )
        yield "rollout.dynamic_sampling", f"{message}; set it to false"


CRITIC_RULES = (
    Rule("a critic of a family without a score head", "it gives one number for each token", (), _no_score_head),
    Rule("a critic of another shape", "it is cut over ranks as the model is", (), _other_shape),
    Rule("a critic with `fp16`", "there is one loss scale, for one model", (), _one_loss_scale),
    Rule(
        "a critic with `rollout.dynamic_sampling`",
        "it would never see prompts that are always right or always wrong",
        (),
        _chosen_prompts,
    ),
)
"""Rules between sections, for stages with a critic."""
