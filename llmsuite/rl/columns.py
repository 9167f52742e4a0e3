"""The data columns that rewards and environments read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.section import Section, value_at
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


def missing_columns(
    rewards: RewardSection, environment: EnvironmentSection | None, rows: Sequence[tuple[str, Prompt]]
) -> Iterator[tuple[str, str]]:
    """Recipe keys of rewards that name columns which no given row has, each with the message about the first row.

    A run ends when more than `reward.max_failed` of the rewards of a step are missing: one row without a value is fine.

    Args:
        rewards: section `reward` of the recipe.
        environment: section `environment`; None for a stage without it.
        rows: the first rows of a file, each with its location; at least one.
    """
    for prefix, section in _sections(rewards, environment):
        for name in section.needs_columns:
            column = value_at(section, name)
            if all(row.columns.get(column) is None for _, row in rows):
                where, first = rows[0]
                try:
                    value_of(first.columns, column, f"{prefix}.{name}")
                except ValueError as error:
                    yield f"{prefix}.{name}", f"{where}: {error}"


def _sections(rewards: RewardSection, environment: EnvironmentSection | None) -> Iterator[tuple[str, Section]]:
    """The sections of the rewards with a weight, each with its key. The section of the reward `environment` is that of
    the environment. Nothing where every reward may be missing."""
    if rewards.max_failed >= 1:
        return
    for name, weight in rewards.functions.items():
        if not weight:
            continue
        prefix = f"reward.{name}"
        section = value_at(rewards, name)
        if name == "environment" and environment is not None:
            prefix = f"environment.{environment.name}"
            section = value_at(environment, environment.name or "")
        if isinstance(section, Section):
            yield prefix, section
