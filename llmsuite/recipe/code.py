"""Python that a recipe names, and that a run imports: rewards, environments, collators.

A recipe may come from a stranger, and only these keys of it name code. So a run imports such a file where whoever
starts it has named it on the command line or in a program, or keeps it with the recipe or in the working directory; all
others need `--allow-code`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsuite.python_files import ALLOW_CODE, python_function
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.schema.environment import EnvironmentSection
from llmsuite.schema.recipe import Recipe
from llmsuite.schema.reward import RewardSection
from llmsuite.schema.rule import Violation


def rewards_and_environments(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Kind, key and value of each reward and environment that a recipe names: of a plugin, or FILE.py:NAME."""
    rewards, environment = getattr(recipe, "reward", None), getattr(recipe, "environment", None)
    for name in rewards.functions if isinstance(rewards, RewardSection) else ():
        yield "reward", "reward.functions", name
    if isinstance(environment, EnvironmentSection) and environment.name is not None:
        yield "environment", "environment.name", environment.name


def code_files(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Key and path of each Python file that a run of a recipe imports. Reads no key, as whoever trains has to."""
    for _, key, name in rewards_and_environments(recipe):
        if (parsed := python_function(name)) is not None:
            yield key, Path(parsed[0])
    sections: Any = recipe.__dict__
    collator = getattr(sections["data"], "__dict__", {}).get("collator")
    if isinstance(collator, str) and (parsed := python_function(collator)) is not None:
        yield "data.collator", Path(parsed[0])
    environment = getattr(sections.get("environment"), "__dict__", {})
    verifiers = getattr(environment.get("verifiers"), "__dict__", {}).get("id")
    if environment.get("name") == "verifiers" and isinstance(verifiers, str) and verifiers.endswith(".py"):
        yield "environment.verifiers.id", Path(verifiers)


def code_problems(loaded: LoadedRecipe) -> Iterator[Violation]:
    """The files that a recipe names and that nobody has allowed."""
    if os.environ.get(ALLOW_CODE):
        return
    homes = [Path(os.path.realpath(home)) for home in (Path(loaded.name).parent, Path.cwd())]
    for key, path in code_files(loaded.recipe):
        is_own = loaded.origin(tuple(key.split("."))).startswith("--")
        if not is_own and not any(Path(os.path.realpath(path)).is_relative_to(home) for home in homes):
            yield (
                key,
                f"names code in {path}, which would be run and lies neither beside the recipe nor in the working "
                f"directory {homes[1]}; look at it, then allow it with --allow-code, or name it on the command line",
            )
