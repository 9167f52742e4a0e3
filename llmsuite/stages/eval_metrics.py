"""Names of the metrics of evaluations, for `StageProfile.evaluates`. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmsuite.contract.specs import StageProfile


def loss_metrics(*extra: str) -> Callable[[StageProfile, Any], tuple[str, ...]]:
    """Names for stages whose evaluations compute the loss: "loss", its sums, and `extra` metrics of evaluations
    only."""
    return lambda profile, recipe: ("loss", *profile.sums, *extra)


def rollout_metrics(profile: StageProfile, recipe: Any) -> tuple[str, ...]:
    """Names for stages whose evaluations sample completions and score them."""
    rewards = list(recipe.reward.names().values())
    return (
        *("reward", "reward/std", *(f"rewards/{name}" for name in rewards), "rewards/missing"),
        *(f"rewards/{name}/*" for name in rewards),  # their standard deviations and parts
        *(f"pass@{k}" for k in recipe.eval_rollout.pass_at),
        *("entropy", "completions/length", "completions/length_min", "completions/length_max"),
        *("completions/length_ended", "completions/truncated", "episodes/*"),
    )
