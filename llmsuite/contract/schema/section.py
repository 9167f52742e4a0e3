"""Base class of recipe sections: strictly typed dataclasses that track which of their keys are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar


@dataclasses.dataclass(kw_only=True)
class Section:
    """Base class of all recipe sections; subclass it with `@dataclass(kw_only=True)`.

    Types are checked without coercion: `true` is not an integer, `"1"` is not a number, and unknown keys are errors.
    Write a docstring under each field: `llmsuite list keys` and the JSON Schema show it.
    """

    # Configuration of pydantic as a plain dict, so that modules with sections need not import pydantic.
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    extended_by: ClassVar[str] = ""
    """Kind of registered specs whose own keys are below their names in this section: "reward", "environment" or
    "rollout engine"."""
    needs_columns: ClassVar[tuple[str, ...]] = ()
    """Keys that name columns of the data without which a reward or an environment cannot compute a reward. `llmsuite
    validate` and `llmsuite run` check that the first rows have these columns."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each violated rule between keys of this section. Override to add rules."""
        return iter(())

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("_") and name in type(self).__dataclass_fields__:
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return value


def forget_reads(section: Section) -> None:
    """Reset the record of read keys, which the checks of a recipe fill: checking a key does not count as using it."""
    section.__dict__.pop("_read", None)
    for field in dataclasses.fields(section):
        value = section.__dict__[field.name]
        if isinstance(value, Section):
            forget_reads(value)


def as_plain(section: Section) -> dict[str, Any]:
    """Return the section as JSON data, without recording its keys as read."""
    values = ((field.name, section.__dict__[field.name]) for field in dataclasses.fields(section))
    return {name: as_plain(value) if isinstance(value, Section) else value for name, value in values}


def unread(section: Section, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys that nothing has read, whether the recipe sets them or not."""
    for field in dataclasses.fields(section):
        key = (*prefix, field.name)
        value = section.__dict__[field.name]
        if isinstance(value, Section):
            yield from unread(value, key)
        elif field.name not in section.__dict__.get("_read", ()):
            yield key
