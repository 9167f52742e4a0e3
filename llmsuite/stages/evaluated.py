"""Names of the metrics of evaluations, for `StageSpec.evaluates`. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmsuite.specs import StageProfile


def of_loss(*further: str) -> Callable[[StageProfile, Any], tuple[str, ...]]:
    """Names where evaluations compute the loss: it, its sums, and `further` metrics that training does not have."""
    return lambda profile, recipe: ("loss", *profile.sums, *further)


def of_completions(profile: StageProfile, recipe: Any) -> tuple[str, ...]:
    """Names where evaluations draw completions and score them, whatever the loss is made of."""
    rewards = list(recipe.reward.names().values())
    return (
        *("reward", "reward/std", *(f"rewards/{name}" for name in rewards), "rewards/missing"),
        *(f"rewards/{name}/*" for name in rewards),  # how far they spread, and their parts
        *(f"pass@{k}" for k in recipe.eval_rollout.pass_at),
        *("entropy", "completions/length", "completions/length_min", "completions/length_max"),
        *("completions/length_ended", "completions/truncated", "episodes/*"),
    )
