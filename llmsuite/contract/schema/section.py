"""Base class of recipe sections: strictly typed dataclasses that track which of their keys are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from llmsuite.base.fields import field_values


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


def stored(section: object, *path: str) -> Any:
    """Return the value at a path of keys below a section, without recording the keys as read; None where there is
    none."""
    for key in path:
        if not isinstance(section, Section):
            return None
        section = section.__dict__.get(key)
    return section


def values_of(section: Section) -> dict[str, Any]:
    """Return the value of each key of a section, recorded as read."""
    return field_values(section)


def subsection(section: Section, name: str) -> Any:
    """Return a section below another one whose name is not known in advance, such as that of a registered stage in a
    recipe, or of a reward in section `reward`; None where there is none."""
    return getattr(section, name, None)


def changed_keys(section: Section) -> list[str]:
    """Return the keys of a section whose values are not the defaults, recorded as read. A required key has none."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(section)}
    return [key for key, value in values_of(section).items() if value != defaults[key]]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a key; `dataclasses.MISSING` for a required one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
