"""The rule about the metric that decides which checkpoint is best."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation

_OF_LOSSES = {"sft": ("tokens/accuracy",), "lora": ("tokens/accuracy",), "pretrain": (), "dpo": (), "rm": (), "kto": ()}
"""By stage the metrics that only its evaluations have, beside the sums of its loss."""
_DRAWING = ("grpo", "online_dpo", "ppo")
_OF_COMPLETIONS = (
    *("reward", "reward/std", "rewards/missing", "entropy", "completions/length", "completions/length_min"),
    *("completions/length_max", "completions/truncated", "completions/length_ended"),
)
_OPEN = ("rewards/", "pass@", "episodes/")
"""How names begin that depend on rewards, on how many completions are drawn, and on the environment."""
OF_ANSWERS = ("bleu4", "rouge1", "rouge2", "rougel", "exact_match")
"""The metrics of answers that an evaluation generates."""


def evaluation_metrics(context: RuleContext) -> tuple[str, ...] | None:
    """The names that metrics of the evaluation have, as far as they are known without a run; None for stages of
    plugins, whose losses may give more than they list."""
    recipe, name = context.recipe, context.stage.name
    if name in _DRAWING:
        return tuple(f"eval/{metric}" for metric in _OF_COMPLETIONS)
    if name not in _OF_LOSSES:
        return None
    sums = context.stage.profile(getattr(recipe, context.stage.section_name)).sums
    further = ("mtp_loss",) if recipe.train.mtp_loss_weight else ()
    answers = OF_ANSWERS if recipe.generation.max_new_tokens is not None else ()
    return tuple(f"eval/{metric}" for metric in ("loss", *sums, *_OF_LOSSES[name], *further, *answers))


def _no_such_metric(context: RuleContext) -> Iterator[Violation]:
    given, known = context.recipe.checkpoint.best_metric, evaluation_metrics(context)
    if not given or known is None or given in known:
        return
    if context.stage.name in _DRAWING and given.startswith(tuple(f"eval/{begin}" for begin in _OPEN)):
        return
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = f", and those of rewards, eval/{_OPEN[0]}NAME" if context.stage.name in _DRAWING else ""
    message = f"is {given!r}, which no evaluation of this recipe has; {hint}It has {', '.join(known)}{more}"
    yield "checkpoint.best_metric", message


METRIC_RULES = (
    Rule(
        "a `best_metric` that the evaluation does not have",
        "the run would fail at its first evaluation",
        ("--checkpoint.best_metric=eval/lss",),
        _no_such_metric,
    ),
)
"""Rules about metrics."""
