"""Rows without the turns as their file has them, for tests of what is read of these."""

from __future__ import annotations

import dataclasses
from typing import Any

from llmsuite.data.rows import Message


def fields(value: Any) -> Any:
    """A row whose turns have the fields that the suite reads, without ids of calls, and nothing else."""
    if isinstance(value, Message):
        calls = tuple(dataclasses.replace(call, id=None) for call in value.tool_calls)
        return dataclasses.replace(value, raw="", tool_calls=calls)
    if isinstance(value, tuple):
        return tuple(fields(inner) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: fields(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value
