"""Fields of dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any


def field_values(instance: Any) -> dict[str, Any]:
    """Return the value of each field of a dataclass, by name. Unlike `dataclasses.asdict` it copies nothing."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
