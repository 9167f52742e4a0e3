"""Maps the columns of a row to the fields of a data format: `data.columns`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.contract.schema.columns import PARTS, columns_of, is_template
from llmsuite.data.suggest import column_names, did_you_mean


class MissingColumnError(ValueError):
    """A row lacks a column that `data.columns` names: perhaps all rows do, and the name is wrong."""


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row with exactly the fields of a mapping; the row itself where the mapping is empty.

    Args:
        row: the row in its file.
        columns: field -> the name of a column, whose value is unchanged, or a template, in which each {name} is
            replaced by the text or the number in this column, and by nothing where it is null. Braces in a value are
            kept.

    Raises:
        MissingColumnError: the row has no such column.
        ValueError: a template cannot take its value.
    """
    if not columns:
        return row
    return {field: _value(row, field, source) for field, source in columns.items()}


def _value(row: Mapping[str, Any], field: str, source: str) -> Any:
    for name in columns_of(source):
        if name not in row:
            how = ""
            if not is_template(source):
                how = "; a text has to name a column in braces"
            hint = did_you_mean(name, row) or how
            raise MissingColumnError(
                f"has no column {name!r}, which data.columns.{field} takes: it has {column_names(row)}{hint}"
            )
    if not is_template(source):
        return row[source]
    return PARTS.sub(lambda found: found[0][0] if found[1] is None else _text(row[found[1]], found[1], field), source)


def _text(value: Any, name: str, field: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        what = type(value).__name__
        raise ValueError(f"column {name!r} is a {what}; the template of data.columns.{field} takes texts and numbers")
    return str(value)
