"""Base class of recipe sections: strictly typed dataclasses that declare which of their keys have no effect."""

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

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) for each key that nothing uses while the other keys have these values; all others are
        used. Override to declare them.

        The own value of the key does not matter: a recipe is refused if it sets such a key to another value than its
        default, with the reason as message, such as "has no effect while rank is null; set that too, or remove it".
        The name of a section below this one stands for all its keys.
        """
        return iter(())

    def unused_elsewhere(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, reason), as `unused`, for each key of the sections of all recipes, or of the additional
        sections of its stage, that a stage with this section does not use, such as "data.mix". Asked of the own section
        of a stage."""
        return iter(())


def as_plain(section: Section) -> dict[str, Any]:
    """Return the section as JSON data."""
    values = field_values(section)
    return {name: as_plain(value) if isinstance(value, Section) else value for name, value in values.items()}


def unused_keys(section: Section, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key, reason) for each key that a section, or a section below it, declares as unused."""
    reasons = dict(section.unused())
    for name, value in field_values(section).items():
        key = (*prefix, name)
        if isinstance(value, Section) and name in reasons:
            yield from ((inner, reasons[name]) for inner in _leaves(value, key))
        elif isinstance(value, Section):
            yield from unused_keys(value, key)
        elif name in reasons:
            yield key, reasons[name]


def keys_in_vain(section: Section) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key, reason) for each unused key that has another value than its default."""
    for key, reason in unused_keys(section):
        parent = value_at(section, *key[:-1])
        if key[-1] in changed_keys(parent):
            yield key, reason


def violations(section: Section) -> Iterator[tuple[str, str]]:
    """Yield what `violated_rules` yields, and (dotted key, reason) for each key that is set in vain."""
    yield from violated_rules(section)
    for key, reason in keys_in_vain(section):
        yield ".".join(key), reason


def violated_rules(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for each rule between keys that a section, or one below it, violates."""
    for key, message in section.problems():
        yield prefix + key, message
    for name, value in field_values(section).items():
        if isinstance(value, Section):
            yield from violated_rules(value, f"{prefix}{name}.")


def _leaves(section: Section, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield all keys below a section."""
    for name, value in field_values(section).items():
        if isinstance(value, Section):
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name)


def value_at(section: object, *path: str) -> Any:
    """Return the value or section at a path of keys that is not known in advance, such as the section of a registered
    stage in a recipe; None where there is none."""
    for key in path:
        if not isinstance(section, Section):
            return None
        section = getattr(section, key, None)
    return section


def subsections(section: Section) -> list[str]:
    """Return the names of the sections below a section, such as those of all registered rewards below `reward`."""
    return [name for name, value in field_values(section).items() if isinstance(value, Section)]


def keys_except(section: Section, name: str) -> list[str]:
    """Return the keys of a section without this one, and without the sections below it."""
    below = subsections(section)
    return [key for key in field_values(section) if key != name and key not in below]


def changed_keys(section: Section) -> list[str]:
    """Return the keys of a section whose values are not the defaults. A required key has none."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(section)}
    return [key for key, value in field_values(section).items() if value != defaults[key]]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a key; `dataclasses.MISSING` for a required one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
