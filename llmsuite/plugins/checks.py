"""Refuses specs of a plugin that would fail only where they are used, or would break what others use."""

from __future__ import annotations

import dataclasses
import json
import keyword
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from llmsuite.errors import UserError
from llmsuite.models.head import NO_KEYS
from llmsuite.schema.keys import describe
from llmsuite.schema.recipe import Recipe
from llmsuite.schema.section import Section, as_plain
from llmsuite.specs import (
    Command,
    EnvironmentSpec,
    ModelFamily,
    RewardSpec,
    RolloutEngineSpec,
    StageProfile,
    StageSpec,
)


def check_fields(kind: str, spec: Any) -> None:
    """Refuse a value of another type than its field has: a name that is no text, no function where one is called."""
    if not isinstance(spec.name, str) or not spec.name.strip():
        raise UserError(f"a {kind} is called {spec.name!r}; a name has to be a text")
    hints = typing.get_type_hints(type(spec))
    for field in dataclasses.fields(spec):
        value, hint, what = getattr(spec, field.name), hints[field.name], f"{field.name} of {kind} {spec.name!r}"
        if isinstance(value, str) and typing.get_origin(hint) in (Sequence, tuple):
            raise UserError(f"{what} is a text; it has to be a tuple: ({value!r},)")
        if not _fits(value, hint):
            raise UserError(f"{what} has to be {_words(hint)}, and is a {type(value).__name__}: {value!r}")
    if kind in ("stage", "model") and isinstance(spec.factory, type):
        raise UserError(
            f"factory of {kind} {spec.name!r} is the class {spec.factory.__name__}; it has to be a function that "
            "returns the class"
        )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as far as it is worth asking. Classes of keys have a check of their own."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or origin is type:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is Callable:
        return callable(value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if origin in (Sequence, tuple):
        return isinstance(value, (list, tuple)) and all(_fits(item, parts[0]) for item in value)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    """A type in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, parts))
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return f"a mapping of {_words(parts[0])} to {_words(parts[1])}"
    if origin in (Sequence, tuple):
        return f"a tuple of {_words(parts[0])}"
    if origin is type:
        return "a class"
    return "None" if hint is type(None) else describe(hint)


def check_command(spec: Command) -> None:
    """Refuse a name that the command line cannot have: one such would end every command."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", spec.name) or spec.name in ("command", "no_plugins", "plugin"):
        raise UserError(
            f"a command cannot be called {spec.name!r}: the name has to be one word, of letters, digits, - and _, and "
            "not command, no_plugins or plugin"
        )


def check_stage(spec: StageSpec) -> None:
    """Refuse what would break the schema of recipes: the stage's name becomes a key there, its class a section."""
    taken = {field.name for field in dataclasses.fields(Recipe)}
    for name in (spec.section_name, *spec.sections):
        if not name.isidentifier() or keyword.iskeyword(name) or name in taken:
            raise UserError(f"a stage cannot be called {name!r}: the name has to be a new key of a recipe, one word")
        taken.add(name)
    for cls in spec.sections.values():
        _check_section(cls, "stage", spec.name)
    section = _check_section(spec.config_cls, "stage", spec.name)
    if section is not None and not list(section.problems()):
        profile = spec.profile(section)
        if not isinstance(profile, StageProfile):
            raise UserError(
                f"profile of stage {spec.name!r} returned a {type(profile).__name__}; it has to return a StageProfile"
            )


def check_family(spec: ModelFamily) -> None:
    """Refuse a shape that would be no section of a recipe and no config.json."""
    cls, what = spec.config_cls, f"config_cls of model {spec.name!r}"
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        found = cls.__name__ if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise UserError(f"{what} is {found}; it has to be a dataclass with the fields of the shape")
    missing = [name for name in ("from_hf", "to_hf", "problems") if not callable(getattr(cls, name, None))]
    if missing:
        raise UserError(
            f"{what}: {cls.__name__} has no method {', '.join(missing)}; llmsuite.models.plain.PlainShape has them"
        )
    _make_schema(spec.config_keys, f"{what}: {cls.__name__}")
    fields = {field.name for field in dataclasses.fields(cls) if field.name not in NO_KEYS}
    for place, shape in (("smoke", spec.smoke), *((f"preset {name!r}", found) for name, found in spec.presets.items())):
        if unknown := shape.keys() - fields:
            raise UserError(f"{place} of model {spec.name!r}: {cls.__name__} has no field {', '.join(sorted(unknown))}")


def _check_section(cls: Any, kind: str, name: str) -> Section | None:
    """Refuse a class whose fields would be no keys of a recipe. Returns a section with its defaults; None where a key
    has none."""
    what = f"config_cls of {kind} {name!r}"
    if not (isinstance(cls, type) and issubclass(cls, Section)):
        raise UserError(f"{what} has to be a dataclass derived from {Section.__module__}.Section")
    if "__dataclass_fields__" not in vars(cls) and vars(cls).get("__annotations__"):
        raise UserError(f"{what}: {cls.__name__} lacks @dataclasses.dataclass(kw_only=True)")
    _make_schema(lambda: cls, f"{what}: {cls.__name__}")
    needed = (f for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING)
    if any(needed):
        return None
    section = cls()
    try:
        TypeAdapter(cls).validate_json(json.dumps(as_plain(section)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}: a default of {cls.__name__} is no value of its key: {error}") from error
    for found in section.problems():
        if not (isinstance(found, tuple) and len(found) == 2):
            raise UserError(f"{what}: {cls.__name__}.problems gave {found!r}; it has to give pairs: (key, message)")
    return section


def _make_schema(cls: Callable[[], Any], what: str) -> None:
    """Raise UserError for a class with a type that is no type, or none of JSON: `llmsuite schema` has all of them."""
    try:
        TypeAdapter(cls()).json_schema()
    except (NameError, TypeError, PydanticUserError) as error:
        raise UserError(f"{what} has a key without a type that JSON has: {error}") from error


def check_keys(section: str, spec: RewardSpec | RolloutEngineSpec | EnvironmentSpec, taken: set[str]) -> None:
    """Refuse what would break the section `reward`, `environment` or `rollout`: the keys of a spec become a section
    there, of its name."""
    kind = "rollout engine" if isinstance(spec, RolloutEngineSpec) else section
    article = "an" if kind == "environment" else "a"
    if not spec.name.isidentifier() or keyword.iskeyword(spec.name) or spec.name in taken:
        raise UserError(
            f"{article} {kind} cannot be called {spec.name!r}: the name has to be a new key of `{section}`, one word"
        )
    if spec.config_cls is not None and _check_section(spec.config_cls, kind, spec.name) is None:
        raise UserError(f"config_cls of {kind} {spec.name!r}: every key needs a default")
