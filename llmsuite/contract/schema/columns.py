"""Values of `data.columns`: the name of a column, or a template that inserts columns into text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""Escaped braces ({{ and }}) and column names in braces; a template copies everything else.

Braces hold a name only: unlike in `str.format`, no attribute, index, conversion or format specification."""


_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
"""Variables of chat templates that a conversation and its use determine."""


def kwargs_fault(kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return name and fault of the first entry of `chat_template_kwargs` that cannot be set; None without one."""
    for name in kwargs:
        if not isinstance(name, str) or not name:
            return str(name), "is no name of a variable"
        if name in _OWN_VARIABLES:
            return name, "is not set by hand: it is the conversation's"
    return None


def kwargs_problems(kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for a faulty entry of a key `chat_template_kwargs`."""
    fault = kwargs_fault(kwargs)
    if fault is not None:
        yield f"chat_template_kwargs.{fault[0]}", fault[1]


def fill_problems(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each faulty entry of `data.fill`."""
    if "" in texts:
        yield "fill", "has an empty text to replace; give the text that rows have, such as {{NAME}}"


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
