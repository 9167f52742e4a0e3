"""The rules about the metric that selects the best checkpoint and stops a run."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.base.suggestions import suggestion
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.recipe.plans import DEFAULT_METRIC, evaluation_names, known_direction
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
    prefixes = [f"eval/{name}/" if name else "eval/" for name in evaluation_names(recipe.data)]
    return tuple(prefix + name for prefix in prefixes for name in (*names, *mtp, *answers))


def _no_such_metric(context: RuleContext) -> Iterator[Violation]:
    recipe = context.recipe
    known = _evaluated(context)
    if known is None:
        return
    key = "checkpoint.best_metric"
    given = recipe.checkpoint.best_metric
    stopping = recipe.train.early_stopping
    if given is None and stopping.patience is not None and context.evaluates:
        key = "train.early_stopping.metric"
        given = stopping.metric or DEFAULT_METRIC
    if not given:
        return
    prefixes = tuple(name[:-1] for name in known if name.endswith("*"))
    exact = [name for name in known if not name.endswith("*")]
    if given in exact or given.startswith(prefixes):
        return
    hint = suggestion(given, exact)
    yield (
        key,
        f"is {given!r}, which is not an evaluation metric of this recipe; {hint}known: {', '.join(known)}",
    )


def _no_stopping(context: RuleContext) -> Iterator[Violation]:
    train = context.recipe.train
    key = "train.early_stopping.patience"
    patience = train.early_stopping.patience
    if patience is None:
        return
    if not context.evaluates:
        yield key, f"is {patience}, but there is no evaluation data; set data.eval or data.holdout, or remove it"
    elif train.eval_steps is None:
        yield key, f"is {patience}, but only the last step is evaluated; set train.eval_steps, or remove it"
    best = context.recipe.checkpoint.best_metric
    metric = train.early_stopping.metric
    if best is not None and metric is not None and metric != best:
        message = f"is {metric!r}, but the best checkpoint is kept by checkpoint.best_metric {best!r}"
        yield "train.early_stopping.metric", f"{message}; give the same, or remove one of them"


def _no_direction(context: RuleContext) -> Iterator[Violation]:
    metric = context.recipe.train.early_stopping.metric
    if metric is None or context.recipe.checkpoint.best_metric is not None or known_direction(metric) is not None:
        return
    if any(_no_such_metric(context)):
        return
    yield (
        "train.early_stopping.metric",
        f"is {metric!r}, whose name does not tell if the lowest or the highest value is best; set "
        f"checkpoint.best_metric to {metric!r}, and checkpoint.best_is",
    )


METRIC_RULES = (
    Rule(
        "`early_stopping` without evaluations before the last step, or by another metric than `best_metric`",
        "it would never stop, or the checkpoint that is kept would not be the best one",
        ("--train.early_stopping.patience=2", "--train.eval_steps=null"),
        _no_stopping,
    ),
    Rule(
        "a `best_metric` or `early_stopping.metric` that the evaluation does not have",
        "the run would fail at its first evaluation",
        ("--checkpoint.best_metric=eval/lss",),
        _no_such_metric,
    ),
    Rule(
        "an `early_stopping.metric` of unknown direction without `best_metric`",
        "the run could stop while it improves, and keep its worst checkpoint",
        (
            "--train.eval_steps=1",
            "--train.early_stopping.patience=2",
            "--train.early_stopping.metric=eval/logps/chosen",
        ),
        _no_direction,
    ),
)
"""Rules about metrics."""
