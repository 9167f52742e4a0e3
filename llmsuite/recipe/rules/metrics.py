"""The rule about the metric that decides which checkpoint is best."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation

OF_ANSWERS = ("bleu4", "rouge1", "rouge2", "rougel", "exact_match")
"""The metrics of answers that an evaluation generates."""


def _evaluated(context: RuleContext) -> tuple[str, ...] | None:
    """The metrics of the recipe's evaluations, as `StageSpec.evaluates` names them; None where it does not."""
    recipe, stage = context.recipe, context.stage
    if stage.evaluates is None:
        return None
    names = stage.evaluates(stage.profile(getattr(recipe, stage.section_name)), recipe)
    further = ("mtp_loss",) if stage.predicts_further and recipe.train.mtp_loss_weight else ()
    answers = OF_ANSWERS if recipe.generation.max_new_tokens is not None else ()
    return tuple(f"eval/{name}" for name in (*names, *further, *answers))


def _no_such_metric(context: RuleContext) -> Iterator[Violation]:
    given, known = context.recipe.checkpoint.best_metric, _evaluated(context)
    if not given or known is None:
        return
    begins = tuple(name[:-1] for name in known if name.endswith("*"))
    whole = [name for name in known if not name.endswith("*")]
    if given in whole or given.startswith(begins):
        return
    near = difflib.get_close_matches(given, whole, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    yield (
        "checkpoint.best_metric",
        f"is {given!r}, which no evaluation of this recipe has; {hint}It has {', '.join(known)}",
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
