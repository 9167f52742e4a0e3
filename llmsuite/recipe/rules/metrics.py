"""The rule about the metric that selects the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.base.suggestions import suggestion
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.recipe.rules.context import RuleContext

GENERATION_METRICS = ("bleu4", "rouge1", "rouge2", "rougel", "exact_match")
"""Metrics of answers generated at evaluations."""


def _evaluated(context: RuleContext) -> tuple[str, ...] | None:
    """Return the names of the recipe's evaluation metrics; None if `StageProfile.evaluates` does not name them."""
    recipe = context.recipe
    profile = context.profile
    if profile.evaluates is None:
        return None
    names = profile.evaluates(profile, recipe)
    mtp = ("mtp_loss",) if "mtp" in context.stage.capabilities and recipe.train.mtp_loss_weight else ()
    answers = GENERATION_METRICS if recipe.generation.max_new_tokens is not None else ()
    return tuple(f"eval/{name}" for name in (*names, *mtp, *answers))


def _no_such_metric(context: RuleContext) -> Iterator[Violation]:
    given = context.recipe.checkpoint.best_metric
    known = _evaluated(context)
    if not given or known is None:
        return
    prefixes = tuple(name[:-1] for name in known if name.endswith("*"))
    exact = [name for name in known if not name.endswith("*")]
    if given in exact or given.startswith(prefixes):
        return
    hint = suggestion(given, exact)
    yield (
        "checkpoint.best_metric",
        f"is {given!r}, which is not an evaluation metric of this recipe; {hint}known: {', '.join(known)}",
    )


METRIC_RULES = (
    Rule(
        "a `best_metric` that the evaluation does not have",
        "the run would fail at its first evaluation",
        ("--checkpoint.best_metric=eval/lss",),
        _no_such_metric,
    ),
)
"""Rules about metrics."""
