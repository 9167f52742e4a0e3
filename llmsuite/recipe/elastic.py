"""Elastic runs: a recipe on fewer machines than it names, after others were lost (`launch.min_nnodes`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmsuite.base.errors import RecipeError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.recipe.resolve import plan_run


def overrides_for_machines(words: Iterable[str], count: int) -> list[str]:
    """Return overrides that run a recipe on `count` machines: those of `words`, with other values for the number of
    machines, the spares and the rank of this machine."""
    replaced = {"--launch.nnodes": count, "--launch.spares": 0, "--launch.node_rank": 0}
    kept = []
    rest = iter(words)
    for word in rest:
        if word.partition("=")[0] not in replaced:
            kept.append(word)
        elif "=" not in word:
            next(rest, None)  # its value
    return [*kept, *(f"{key}={value}" for key, value in replaced.items())]


def check_min_nodes(loaded: LoadedRecipe, path: str, overrides: Sequence[str], registry: Registry, smoke: bool) -> None:
    """Raise RecipeError if a recipe cannot run on `launch.min_nnodes` machines.

    Args:
        loaded: the recipe on all its machines.
        path: recipe file, as in `plan_run`.
        overrides: words of the command line, as in `plan_run`.
        registry: registered stages, families and devices.
        smoke: True for a `--smoke` run.
    """
    launch = loaded.recipe.launch
    if launch.min_nnodes is None or launch.min_nnodes == launch.nnodes:
        return
    try:
        plan_run(path, overrides_for_machines(overrides, launch.min_nnodes), registry, smoke)
    except RecipeError as error:
        first = error.problems[0]
        message = f"the recipe cannot be run on {launch.min_nnodes} machines: {first.key}: {first.message}"
        raise RecipeError([loaded.problem("launch.min_nnodes", message)]) from error
