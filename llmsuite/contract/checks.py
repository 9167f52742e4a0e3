"""Checks of a plugin's specs at registration: errors that would otherwise appear only in use, or in other plugins."""

from __future__ import annotations

import dataclasses
import json
import keyword
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from llmsuite.base.errors import UserError
from llmsuite.base.fields import field_values
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.schema.keys import describe, walk
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.rollout import RolloutSection
from llmsuite.contract.schema.section import Section, as_plain, violations
from llmsuite.contract.specs import (
    Command,
    EnvironmentSpec,
    JobSpec,
    ModelFamily,
    RewardSpec,
    RolloutEngineSpec,
    StageProfile,
    StageSpec,
    SuiteSpec,
)
from llmsuite.devices.device_kernels import DeviceKernels
from llmsuite.models.adapter_method import AdapterMethod, AdapterParameter, PaddleNlpFiles
from llmsuite.models.head import NO_KEYS


def check_fields(kind: str, spec: Any) -> None:
    """Raise UserError if a field of a spec has a value of the wrong type, such as a name that is not text."""
    if not isinstance(spec.name, str) or not spec.name.strip():
        raise UserError(f"a {kind} has the name {spec.name!r}; a name has to be a non-empty text")
    hints = typing.get_type_hints(type(spec))
    for name, value in field_values(spec).items():
        hint = hints[name]
        what = f"{name} of {kind} {spec.name!r}"
        if isinstance(value, str) and typing.get_origin(hint) in (Sequence, tuple):
            raise UserError(f"{what} is a text; it has to be a tuple: ({value!r},)")
        if isinstance(value, str) and typing.get_origin(hint) in (Set, frozenset):
            raise UserError(f"{what} is a text; it has to be a set: {{{value!r}}}")
        if not _fits(value, hint):
            raise UserError(f"{what} has to be {_describe(hint)}, and is a {type(value).__name__}: {value!r}")
    if kind in ("stage", "model") and isinstance(spec.factory, type):
        raise UserError(
            f"factory of {kind} {spec.name!r} is the class {spec.factory.__name__}; it has to be a function that "
            "returns the class"
        )


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value has a type. Classes are not checked here: `_check_section` checks those of keys."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
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
    if origin in (Set, frozenset):
        return isinstance(value, origin) and all(_fits(item, parts[0]) for item in value)
    if origin in (Sequence, tuple):
        return isinstance(value, (list, tuple)) and all(_fits(item, parts[0]) for item in value)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    """Return a type in words."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe, parts))
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return f"a mapping of {_describe(parts[0])} to {_describe(parts[1])}"
    if origin in (Set, frozenset):
        return f"a set of {_describe(parts[0])}"
    if origin in (Sequence, tuple):
        return f"a tuple of {_describe(parts[0])}"
    if origin is type:
        return "a class"
    if hint is type(None):
        return "None"
    return describe(hint)


_WORD = re.compile(r"[A-Za-z][\w-]*")


def check_suite(spec: SuiteSpec) -> None:
    """Raise UserError for a name that cannot follow `llmsuite recipe from-`."""
    if not _WORD.fullmatch(spec.name):
        raise UserError(
            f"a suite cannot be called {spec.name!r}: the name has to be one word, of letters, digits, - and _"
        )


_RL_SECTIONS: Mapping[str, type[Section]] = {
    "rollout": RolloutSection,
    "reward": RewardSection,
    "environment": EnvironmentSection,
}
"""Sections that several stages share: rules and the engine know them by their classes."""
_EXAMPLE = {"rank": 2, "num_inputs": 16, "num_outputs": 24}
"""Sizes that the shapes of an adapter method are tried with."""


def check_adapter_method(spec: AdapterMethod, built_in: Iterable[AdapterMethod]) -> None:
    """Raise UserError for a method of adapters that cannot be a value of `lora.method`, or whose parameters are not
    those that it describes, or have the names of other parameters of the `built_in` methods."""
    name = getattr(spec, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise UserError(f"an adapter method has the name {name!r}; a name has to be one word, of letters, digits and _")
    what = f"adapter method {name!r}"
    if not isinstance(getattr(spec, "help", None), str):
        raise UserError(f"help of {what} has to be a text")
    if spec.is_init:
        raise UserError(f"is_init of {what} is true; plugins register values of lora.method, not of lora.init")
    own = type(spec)
    missing = [hook for hook in ("layers", "shapes", "initial", "merged") if hook not in _defined(own, AdapterMethod)]
    if missing:
        raise UserError(f"{what}: {own.__name__} has to define {', '.join(missing)}")
    parameters = getattr(spec, "parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        raise UserError(f"parameters of {what} has to be a mapping of names to AdapterParameter, and is {parameters!r}")
    for kind, parameter in parameters.items():
        if not isinstance(parameter, AdapterParameter):
            raise UserError(f"parameters of {what}: {kind!r} is a {type(parameter).__name__}, no AdapterParameter")
        if not isinstance(kind, str) or not kind.isidentifier() or kind in ("weight", "bias"):
            raise UserError(f"parameters of {what}: a parameter cannot be called {kind!r}")
        taken = next((m for m in built_in if m.parameters.get(kind, parameter) != parameter), None)
        if taken is not None:
            raise UserError(
                f"parameters of {what}: {kind!r} is a parameter of method {taken.name}, of another kind; choose "
                "another name"
            )
    shapes = spec.shapes(**_EXAMPLE)
    unknown = [kind for kind in shapes if kind not in parameters]
    if unknown or not shapes:
        raise UserError(f"shapes of {what} returned {shapes!r}; its parameters are {', '.join(parameters)}")
    for kind, shape in shapes.items():
        dims = {"by_inputs": parameters[kind].by_inputs, "by_outputs": parameters[kind].by_outputs}
        for field, dim in dims.items():
            if dim is not None and not 0 <= dim < len(shape):
                raise UserError(f"parameters of {what}: {field} of {kind!r} is {dim}, and its shape is {list(shape)}")
    _check_files(what, spec)


def check_kernels(spec: DeviceKernels) -> None:
    """Raise UserError for kernels of a device without the attributes that describe them."""
    name = getattr(spec, "name", None)
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise UserError(f"kernels have the name {name!r}; a name has to be one word, of letters, digits, - and _")
    for field in ("help", "device", "module"):
        if not isinstance(getattr(spec, field, None), str):
            raise UserError(f"{field} of kernels {name!r} has to be a text")
    for field in ("local_only", "weight_only_precisions"):
        if isinstance(getattr(spec, field), str):
            raise UserError(f"{field} of kernels {name!r} is a text; it has to be a set or a tuple of texts")


def _check_files(what: str, spec: AdapterMethod) -> None:
    """Raise UserError for a description of files that names parameters which the method does not have.

    Args:
        what: the method, for messages.
        spec: the method.
    """
    kinds = {"pair_parts": spec.pair_parts}
    if spec.paddlenlp is not None:
        if not isinstance(spec.paddlenlp, PaddleNlpFiles):
            found = type(spec.paddlenlp).__name__
            raise UserError(f"paddlenlp of {what} has to be a PaddleNlpFiles or None, and is a {found}")
        kinds["kinds of paddlenlp"] = spec.paddlenlp.kinds
    for field, named in kinds.items():
        unknown = [kind for kind in named.values() if kind not in spec.parameters]
        if unknown:
            raise UserError(f"{field} of {what}: {unknown[0]!r} is no parameter of it")


def _defined(cls: type, base: type) -> set[str]:
    """Return the names that a class, or a class between it and a base, defines."""
    between = [kind for kind in cls.__mro__ if kind is not base and issubclass(kind, base)]
    return set().union(*(vars(kind) for kind in between))


def check_command(spec: Command) -> None:
    """Raise UserError for a name that cannot be a subcommand: it would make every command fail."""
    if not _WORD.fullmatch(spec.name) or spec.name in ("command", "no_plugins", "plugin"):
        raise UserError(
            f"a command cannot be called {spec.name!r}: the name has to be one word, of letters, digits, - and _, and "
            "not command, no_plugins or plugin"
        )


def check_recipe_command(spec: Command) -> None:
    """Raise UserError for a name that cannot be a subcommand of `llmsuite recipe`, or is one of its own."""
    if not _WORD.fullmatch(spec.name) or spec.name == "new" or spec.name.startswith("from-"):
        raise UserError(
            f"a subcommand of `llmsuite recipe` cannot be called {spec.name!r}: the name has to be one word, of "
            "letters, digits, - and _, and not new or from-NAME, which are its own"
        )


def check_stage(spec: StageSpec | JobSpec) -> None:
    """Raise UserError for a stage that would break the schema of recipes: its name is a key there, its class a
    section."""
    taken = {field.name for field in dataclasses.fields(Recipe)}
    own = spec.section_name
    others = [name for name, cls in spec.sections.items() if (name, cls) != (own, spec.config_cls)]
    for name in (own, *others):
        if not name.isidentifier() or keyword.iskeyword(name) or name in taken:
            raise UserError(f"a stage cannot be called {name!r}: the name has to be a new key of a recipe, one word")
        taken.add(name)
    for name, cls in spec.sections.items():
        _check_section(cls, "stage", spec.name)
        shared = _RL_SECTIONS.get(name)
        if shared is not None and not issubclass(cls, shared):
            raise UserError(
                f"section {name!r} of stage {spec.name!r} is a {cls.__name__}; it has to be, or derive from, "
                f"{shared.__module__}.{shared.__name__}, which rules and the engine read"
            )
    section = _check_section(spec.config_cls, "stage", spec.name)
    if section is not None:
        known = {info.dotted for info in walk(Recipe)}
        known |= {f"{name}.{info.dotted}" for name in others for info in walk(spec.sections[name])}
        if wrong := sorted({key for key, _ in section.unused_elsewhere()} - known):
            raise UserError(
                f"{type(section).__name__}.unused_elsewhere of stage {spec.name!r} yielded {', '.join(wrong)}, which "
                "not all recipes have; for keys of its own section override `unused`"
            )
    if isinstance(spec, JobSpec):
        if unknown := sorted(spec.capabilities - {"score_head"}):
            raise UserError(
                f"capabilities of stage {spec.name!r} has {', '.join(unknown)}, which only stages that train have"
            )
    elif section is not None and not list(violations(section)):
        profile = spec.profile(section)
        if not isinstance(profile, StageProfile):
            raise UserError(
                f"profile of stage {spec.name!r} returned a {type(profile).__name__}; it has to return a StageProfile"
            )


def check_family(spec: ModelFamily) -> None:
    """Raise UserError if the shape of a family cannot be the section `model.config` or a config.json."""
    cls = spec.config_cls
    what = f"config_cls of model {spec.name!r}"
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
    shapes = {"smoke": spec.smoke, **{f"preset {name!r}": preset for name, preset in spec.presets.items()}}
    for where, shape in shapes.items():
        unknown = shape.keys() - fields
        if unknown:
            raise UserError(f"{where} of model {spec.name!r}: {cls.__name__} has no field {', '.join(sorted(unknown))}")


def _check_section(cls: Any, kind: str, name: str) -> Section | None:
    """Raise UserError if the fields of a class cannot be keys of a recipe.

    Returns:
        The section with its defaults; None if a key has no default.
    """
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
        raise UserError(f"{what}: a default of {cls.__name__} is not a valid value of its key: {error}") from error
    for found in section.problems():
        if not (isinstance(found, tuple) and len(found) == 2):
            raise UserError(f"{what}: {cls.__name__}.problems yielded {found!r}; it has to yield pairs: (key, message)")
    for found in section.unused():
        if not (isinstance(found, tuple) and len(found) == 2 and found[0] in cls.__dataclass_fields__):
            raise UserError(f"{what}: {cls.__name__}.unused yielded {found!r}; it has to yield pairs: (key, reason)")
    return section


def _make_schema(cls: Callable[[], Any], what: str) -> None:
    """Raise UserError if the type of a key is not a type, or has no JSON Schema, which `llmsuite schema` needs."""
    try:
        TypeAdapter(cls()).json_schema()
    except (NameError, TypeError, PydanticUserError) as error:
        raise UserError(f"{what} has a key whose type JSON does not have: {error}") from error


def check_keys(section: str, spec: RewardSpec | RolloutEngineSpec | EnvironmentSpec, taken: set[str]) -> None:
    """Raise UserError for a spec that would break section `reward`, `environment` or `rollout`, in which its keys
    become a section of its name.

    Args:
        section: name of that section.
        spec: the spec to check.
        taken: keys that the section has already.
    """
    kind = section
    if isinstance(spec, RolloutEngineSpec):
        kind = "rollout engine"
    article = "an" if kind == "environment" else "a"
    if not spec.name.isidentifier() or keyword.iskeyword(spec.name) or spec.name in taken:
        raise UserError(
            f"{article} {kind} cannot be called {spec.name!r}: the name has to be a new key of `{section}`, one word"
        )
    if spec.config_cls is not None and _check_section(spec.config_cls, kind, spec.name) is None:
        raise UserError(f"config_cls of {kind} {spec.name!r}: every key needs a default")
