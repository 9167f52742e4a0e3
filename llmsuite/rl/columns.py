"""The data columns that rewards and environments read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.section import Section
from llmsuite.data.rows import Prompt
from llmsuite.data.suggest import did_you_mean


def value_of(columns: Mapping[str, Any], column: str, key: str) -> Any:
    """The value of a row in the column that the recipe key `key` names. Raises ValueError when the row has none."""
    found = columns.get(column)
    if found is None:
        known = ", ".join(sorted(columns)) or "none"
        hint = did_you_mean(column, columns)
        raise ValueError(f"the row has no {column!r} ({key}); its other columns: {known}{hint}")
    return found


def missing_columns(recipe: Recipe, rows: Sequence[tuple[str, Prompt]]) -> Iterator[tuple[str, str]]:
    """Recipe keys of rewards that name columns which no given row has, each with the message about the first row.

    A run ends when more than `reward.max_failed` of the rewards of a step are missing: one row without a value is fine.

    Args:
        recipe: of a stage with rewards; reading it here does not mark its keys as used.
        rows: the first rows of a file, each with its location; at least one.
    """
    for prefix, section in _sections(recipe):
        for name in section.needs_columns:
            column = section.__dict__[name]
            if all(row.columns.get(column) is None for _, row in rows):
                where, first = rows[0]
                try:
                    value_of(first.columns, column, f"{prefix}.{name}")
                except ValueError as error:
                    yield f"{prefix}.{name}", f"{where}: {error}"


def _sections(recipe: Recipe) -> Iterator[tuple[str, Section]]:
    """The sections of the rewards with a weight, each with its key. The section of the reward `environment` is that of
    the environment. Nothing where every reward may be missing."""
    # through `__dict__`, as attribute access marks a key as used
    rewards = recipe.__dict__["reward"].__dict__
    environment = recipe.__dict__.get("environment")
    if rewards["max_failed"] >= 1:
        return
    for name, weight in rewards["functions"].items():
        if not weight:
            continue
        prefix = f"reward.{name}"
        owner = rewards
        if name == "environment" and environment is not None:
            owner = environment.__dict__
            name = environment.__dict__["name"]
            prefix = f"environment.{name}"
        section = owner.get(name)
        if isinstance(section, Section):
            yield prefix, section
