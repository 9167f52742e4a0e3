"""Python files that a recipe names and a run imports: rewards, environments and collators.

A recipe may be untrusted, and only these keys of it name code. A run imports such a file only if the user has named it
on the command line or in a program, or if it is in the directory of the recipe or in the working directory; any other
file needs `--allow-code`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from llmsuite.base.python_files import ALLOW_CODE, python_function
from llmsuite.contract.schema.recipe import Recipe, environment_of, reward_of
from llmsuite.contract.schema.rule import Violation
from llmsuite.contract.schema.section import value_at
from llmsuite.recipe.load import LoadedRecipe


def rewards_and_environments(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, key, value) of each reward and environment in a recipe; a value is a registered name or
    FILE.py:NAME."""
    rewards = reward_of(recipe)
    environment = environment_of(recipe)
    if rewards is not None:
        for name in rewards.functions:
            yield "reward", "reward.functions", name
    if environment is not None and environment.name is not None:
        yield "environment", "environment.name", environment.name


def code_files(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Yield (key, path) of each Python file that a run of a recipe imports, without recording the keys as read."""
    for _, key, name in rewards_and_environments(recipe):
        parsed = python_function(name)
        if parsed is not None:
            yield key, Path(parsed[0])
    collator = value_at(recipe, "data", "collator")
    parsed = None
    if isinstance(collator, str):
        parsed = python_function(collator)
    if parsed is not None:
        yield "data.collator", Path(parsed[0])
    verifiers = value_at(recipe, "environment", "verifiers", "id")
    if (
        value_at(recipe, "environment", "name") == "verifiers"
        and isinstance(verifiers, str)
        and verifiers.endswith(".py")
    ):
        yield "environment.verifiers.id", Path(verifiers)


def code_problems(loaded: LoadedRecipe) -> Iterator[Violation]:
    """Yield a violation for each Python file of a recipe that the user has not allowed."""
    if os.environ.get(ALLOW_CODE):
        return
    homes = [Path(os.path.realpath(home)) for home in (Path(loaded.name).parent, Path.cwd())]
    for key, path in code_files(loaded.recipe):
        is_own = loaded.origin(tuple(key.split("."))).startswith("--")
        if not is_own and not any(Path(os.path.realpath(path)).is_relative_to(home) for home in homes):
            yield (
                key,
                f"names code in {path}, which would be executed and is neither next to the recipe nor in the working "
                f"directory {homes[1]}; review it, then allow it with --allow-code, or name it on the command line",
            )
