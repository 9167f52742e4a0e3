"""The columns of rows that rewards and environments read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmsuite.data.rows import Prompt
from llmsuite.data.suggest import did_you_mean
from llmsuite.schema.recipe import Recipe
from llmsuite.schema.section import Section


def value_of(columns: Mapping[str, Any], column: str, key: str) -> Any:
    """What a row has in the column that a dotted key names. Raises ValueError without one."""
    found = columns.get(column)
    if found is None:
        known = ", ".join(sorted(columns)) or "none"
        hint = did_you_mean(column, columns)
        raise ValueError(f"the row has no {column!r} ({key}); its other columns: {known}{hint}")
    return found


def missing_columns(recipe: Recipe, rows: Sequence[tuple[str, Prompt]]) -> Iterator[tuple[str, str]]:
    """Keys of rewards that name columns which none of some rows has, with the message about the first of these rows.

    A run ends when more than `reward.max_failed` of the rewards of a step are missing, so that one row says nothing.

    Args:
        recipe: of a stage with rewards; looking at it here does not count as reading its keys.
        rows: the first ones of a file, each with its place; at least one.
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
    """The sections of the rewards that count, and that of the environment if it gives one of them."""
    rewards, environment = recipe.__dict__["reward"].__dict__, recipe.__dict__.get("environment")
    for name, weight in rewards["functions"].items() if rewards["max_failed"] < 1 else ():
        if not weight:
            continue
        prefix, owner = f"reward.{name}", rewards
        if name == "environment" and environment is not None:
            owner, name = environment.__dict__, environment.__dict__["name"]
            prefix = f"environment.{name}"
        section = owner.get(name)
        if isinstance(section, Section):
            yield prefix, section
