"""Names of the metrics of evaluations, for `StageSpec.evaluates`. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Callable

from llmsuite.specs import StageProfile


def of_loss(*further: str) -> Callable[[StageProfile], tuple[str, ...]]:
    """Names where evaluations compute the loss: it, its sums, and `further` metrics that training does not have."""
    return lambda profile: ("loss", *profile.sums, *further)


def of_completions(profile: StageProfile) -> tuple[str, ...]:
    """Names where evaluations draw completions and score them, whatever the loss is made of."""
    return (
        *("reward", "reward/std", "rewards/*", "rewards/missing", "pass@*", "entropy", "completions/length"),
        *("completions/length_min", "completions/length_max", "completions/length_ended", "completions/truncated"),
        "episodes/*",
    )
