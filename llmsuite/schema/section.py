"""Base of the sections of a recipe: dataclasses that are checked strictly and remember which keys were read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar


@dataclasses.dataclass(kw_only=True)
class Section:
    """Base of all recipe sections; subclass it with `@dataclass(kw_only=True)`.

    Types are checked without coercion: `true` is no integer, `"1"` is no number, and unknown keys are refused.
    Write a docstring under each field: it is what `llmsuite list keys` and the JSON Schema show.
    """

    # Read by pydantic; a plain dict, so that a stage's section needs no pydantic import.
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    extended_by: ClassVar[str] = ""
    """Kind of what is registered and has keys of its own in this section, below its name: "reward" or "rollout
    engine"."""
    needs_columns: ClassVar[tuple[str, ...]] = ()
    """Keys of a reward or an environment that name columns of a row which it gives no reward without. `validate` and
    `run` look for them in the first rows."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between keys of this section, as (key, message). Override to add some."""
        return iter(())

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("_") and name in type(self).__dataclass_fields__:
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return value


def forget_reads(section: Section) -> None:
    """Forget which keys were read: checking a recipe reads every key, which does not count as using it."""
    section.__dict__.pop("_read", None)
    for field in dataclasses.fields(section):
        value = section.__dict__[field.name]
        if isinstance(value, Section):
            forget_reads(value)


def as_plain(section: Section) -> dict[str, Any]:
    """The section as JSON data; this does not count as reading its keys."""
    values = ((field.name, section.__dict__[field.name]) for field in dataclasses.fields(section))
    return {name: as_plain(value) if isinstance(value, Section) else value for name, value in values}


def unread(section: Section, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys that nothing has read, whether they were given or not."""
    for field in dataclasses.fields(section):
        key, value = (*prefix, field.name), section.__dict__[field.name]
        if isinstance(value, Section):
            yield from unread(value, key)
        elif field.name not in section.__dict__.get("_read", ()):
            yield key
