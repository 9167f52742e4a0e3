"""Values of `data.columns`: the name of a column, or a template that inserts columns into text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""Escaped braces ({{ and }}) and column names in braces; a template copies everything else.

Braces hold a name only: unlike in `str.format`, no attribute, index, conversion or format specification."""


def is_template(source: str) -> bool:
    """Return True for a template, False for the plain name of a column."""
    return "{" in source or "}" in source


def columns_of(source: str) -> list[str]:
    """Return the names of the columns in a value of `data.columns`, in their order.

    Raises:
        ValueError: the template is malformed; the message completes "is 'TEMPLATE', which ...".
    """
    if not is_template(source):
        return [source]
    rest = PARTS.sub("", source)
    if "{" in rest or "}" in rest:
        raise ValueError("has a brace without its counterpart; write {{ or }} for one that is text")
    names = [found[1] for found in PARTS.finditer(source) if found[1] is not None]
    if not names:
        raise ValueError("names no column; write one as {name}")
    if "" in names:
        raise ValueError("has {} without the name of a column")
    return names


def column_problems(columns: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each malformed value of a key `columns`."""
    for field, source in columns.items():
        try:
            columns_of(source)
        except ValueError as error:
            yield f"columns.{field}", f"is {source!r}, which {error}"
