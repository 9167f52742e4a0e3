"""What a field of a row is made of, as `data.columns` says it: a column, or a text with columns in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""The parts of a template that are not copied: a brace that is written twice, or the name of a column in braces.

What stands in braces is a name and nothing else: no attribute, index, conversion or format."""


def is_template(source: str) -> bool:
    """Whether it is a text with columns in it, and not the name of a column."""
    return "{" in source or "}" in source


def columns_of(source: str) -> list[str]:
    """The columns that a field is made of, in their order. Raises ValueError saying what is wrong with it."""
    if not is_template(source):
        return [source]
    if "{" in (rest := PARTS.sub("", source)) or "}" in rest:
        raise ValueError("has a brace without its counterpart; write {{ or }} for one that is text")
    names = [found[1] for found in PARTS.finditer(source) if found[1] is not None]
    if not names:
        raise ValueError("names no column; write one as {name}")
    if "" in names:
        raise ValueError("has {} without the name of a column")
    return names


def column_problems(columns: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is wrong with a key `columns`: its field, and the reason."""
    for field, source in columns.items():
        try:
            columns_of(source)
        except ValueError as error:
            yield f"columns.{field}", f"is {source!r}, which {error}"
