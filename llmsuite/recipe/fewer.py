"""A run on fewer machines than its recipe says, after others were lost (`launch.min_nnodes`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmsuite.errors import RecipeError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan, plan_run


def words_for(words: Iterable[str], count: int) -> list[str]:
    """The words of a command line that runs a recipe on another number of machines than some words do: whatever they
    say of the number, of spares and of this machine's place no longer holds."""
    put = {"--launch.nnodes": count, "--launch.spares": 0, "--launch.node_rank": 0}
    kept, rest = [], iter(words)
    for word in rest:
        if word.partition("=")[0] not in put:
            kept.append(word)
        elif "=" not in word:
            next(rest, None)  # its value
    return [*kept, *(f"{key}={value}" for key, value in put.items())]


def check_fewest(plan: RunPlan, path: str, overrides: Sequence[str], registry: Registry, smoke: bool) -> None:
    """Raise RecipeError where a recipe cannot be run on the fewest machines that it allows.

    Args:
        plan: of the recipe as it is.
        path: see `plan_run`, as are the others.
        overrides: see there.
        registry: see there.
        smoke: see there.
    """
    launch = plan.recipe.launch
    if launch.min_nnodes is None or launch.min_nnodes == launch.nnodes:
        return
    try:
        plan_run(path, words_for(overrides, launch.min_nnodes), registry, smoke)
    except RecipeError as error:
        first = error.problems[0]
        message = f"the recipe cannot be run on {launch.min_nnodes} machines: {first.key}: {first.message}"
        raise RecipeError([plan.loaded.problem("launch.min_nnodes", message)]) from error
