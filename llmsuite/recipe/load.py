"""From a recipe file and command-line overrides to typed sections. This is where a typo dies.

All problems are collected and raised together, each with the position of what caused it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmsuite.errors import Problem, RecipeError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.document import of_another_suite, read_document
from llmsuite.recipe.problems import first_ones
from llmsuite.recipe.source import Key, parse_json
from llmsuite.recipe.untrained import SECTIONS
from llmsuite.schema import keys as recipe_keys
from llmsuite.schema.recipe import ModelSection, Recipe, device_numbers
from llmsuite.schema.section import Section, forget_reads, unread
from llmsuite.shown import SECRETS

_OVERRIDE = re.compile(r"--(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_][\w-]*)*)=(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_MOST_HINTS, _MOST_OVERRIDES = 20, 1000
_MOST_SHOWN = 200
"""Characters of a wrong value that are shown."""


@dataclasses.dataclass
class LoadedRecipe:
    """A recipe whose keys and types are valid, and where each value came from."""

    recipe: Recipe
    given: set[Key]
    """Leaf keys that somebody wrote, in the file or on the command line."""
    origins: dict[Key, str]
    """Where each given key was written."""
    name: str

    def origin(self, key: Key) -> str:
        """Position of a key, or of the nearest section around it."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, self.name)

    def problem(self, key: str, message: str) -> Problem:
        """Something wrong with a dotted key, at the place it was written."""
        return Problem(self.origin(tuple(key.split("."))), key, message)

    def unread(self) -> list[str]:
        """Keys that were given and that nothing has read since the recipe was loaded: they have no effect.

        A key that was given its default value is not listed: a resolved recipe writes out every default.
        """
        idle = {key for key in unread(self.recipe) if not self._is_default(key)}
        return sorted(".".join(key) for key in self.given if any(key[:n] in idle for n in range(1, len(key) + 1)))

    def _is_default(self, key: Key) -> bool:
        section: Any = self.recipe
        for part in key[:-1]:
            section = section.__dict__[part]
        field = next(f for f in dataclasses.fields(section) if f.name == key[-1])
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        return bool(section.__dict__[key[-1]] == default)


def load(
    path: str | Path,
    overrides: Iterable[str],
    registry: Registry,
    layers: Iterable[tuple[str, dict[str, Any]]] = (),
) -> LoadedRecipe:
    """Read a recipe, apply `layers` and then the command line to it, and check all of it.

    Args:
        path: the JSON, JSONC or YAML file.
        overrides: `--a.b=c` words; values are JSON, or bare text where the key takes text.
        registry: the known stages, model families, devices …
        layers: (origin, {dotted key: value or REMOVE}), applied over the file and under the command line.

    Raises:
        RecipeError: with every problem found.
    """
    source = read_document(path)
    if not isinstance(source.value, dict):
        raise RecipeError([Problem(f"{path}:1:1", "", "a recipe is an object: {...}, or in YAML key: value")])
    if (fault := of_another_suite(source.value)) is not None:
        raise RecipeError([Problem(f"{path}:1:1", "", fault)])
    origins = {**source.values, **source.keys}
    tree: dict[str, Any] = source.value
    for origin, layer in layers:
        for dotted, value in layer.items():
            _put(tree, origins, tuple(dotted.split(".")), value, origin)
    problems = _apply_overrides(tree, origins, overrides, registry)
    _count_devices(tree, origins)
    SECRETS.add_data(tree)

    cls, name_problems = recipe_type(tree, registry)
    loaded = LoadedRecipe(None, _leaves(tree), origins, str(path))  # type: ignore[arg-type]
    problems += [loaded.problem(key, message) for key, message in name_problems]
    recipe, bind_problems = _bind(cls, tree, loaded, registry)
    problems += bind_problems
    if recipe is not None:
        loaded.recipe = recipe
        problems += [loaded.problem(key, message) for key, message in _section_rules(recipe)]
    if problems:
        raise RecipeError(first_ones(problems))
    forget_reads(loaded.recipe)
    return loaded


def _count_devices(tree: dict[str, Any], origins: dict[Key, str]) -> None:
    """Let num_devices follow from a list of devices: where it is not given, or only in a file whose devices the command
    line chooses."""
    launch, key = tree.get("launch"), ("launch", "num_devices")
    if not isinstance(launch, dict):
        return
    with contextlib.suppress(ValueError, TypeError):  # of another type: that is reported with all others
        numbers = device_numbers(launch.get("devices"))
        origin = origins.get(("launch", "devices"), "")
        chosen_later = origin.startswith("--") and not origins.get(key, "--").startswith("--")
        if numbers is not None and ("num_devices" not in launch or chosen_later):
            _put(tree, origins, key, len(numbers), origin or origins[("launch",)])


REMOVE = object()
"""A value in a layer that removes the key."""


def recipe_type(tree: dict[str, Any], registry: Registry) -> tuple[type[Recipe], list[tuple[str, str]]]:
    """The recipe class for the stage and family a document names, and what is wrong with those names."""
    problems: list[tuple[str, str]] = []
    stage, family = tree.get("stage"), None
    if isinstance(tree.get("model"), dict):
        family = tree["model"].get("family")
    if isinstance(stage, str) and stage not in registry.stages:
        problems.append(("stage", registry.unknown("stage", stage)))
        stage = None
    if isinstance(family, str) and family not in registry.models:
        problems.append(("model.family", registry.unknown("model", family)))
        family = None
    return (
        _typed_recipe(
            registry.stages[stage] if isinstance(stage, str) else None,
            registry.models[family] if isinstance(family, str) else None,
            tuple(
                (kind, spec)
                for kind in ("reward", "environment", "rollout engine")
                for spec in registry.specs(kind).values()
            ),
        ),
        problems,
    )


@functools.cache
def _typed_recipe(stage: Any, family: Any, specs: tuple[tuple[str, Any], ...]) -> type[Recipe]:
    fields: list[Any] = []
    if family is not None:
        model = dataclasses.make_dataclass(
            "ModelSection",
            [("config", family.config_keys(), dataclasses.field(default_factory=dict))],
            bases=(ModelSection,),
            kw_only=True,
        )
        fields.append(("model", model))
    if stage is not None:
        default = _default_of(stage.config_cls)
        fields.append((stage.section_name, stage.config_cls, default))
        sections = {name: _extended(section, specs) for name, section in stage.sections.items()}
        fields += [(name, section, _default_of(section)) for name, section in sections.items()]
        for name, section in () if stage.trains else SECTIONS.items():
            default = dataclasses.field(default_factory=section) if name != "data" else dataclasses.field()
            fields.append((name, section, default))
    return dataclasses.make_dataclass("Recipe", fields, bases=(Recipe,), kw_only=True)


def _default_of(section: type[Section]) -> Any:
    """A field for a section; one with a key that is required has no default."""
    required = any(
        f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        for f in dataclasses.fields(section)
    )
    return dataclasses.field() if required else dataclasses.field(default_factory=section)


def _extended(section: type[Section], specs: tuple[tuple[str, Any], ...]) -> type[Section]:
    """A section such as `reward` with the keys of each registered reward below its name; most sections as they are."""
    own = [spec for kind, spec in specs if kind == section.extended_by and spec.config_cls]
    if not own:
        return section
    fields = [(spec.name, spec.config_cls, _default_of(spec.config_cls)) for spec in own]
    made = dataclasses.make_dataclass(section.__name__, fields, bases=(section,), kw_only=True)
    made.__doc__ = section.__doc__
    return made


def _apply_overrides(
    tree: dict[str, Any], origins: dict[Key, str], overrides: Iterable[str], registry: Registry
) -> list[Problem]:
    """Write the overrides into the tree. The type of a key may depend on an override of stage or family."""
    problems: list[Problem] = []
    parsed: dict[Key, tuple[str, str]] = {}
    words = list(overrides)
    if len(words) > _MOST_OVERRIDES:
        return [Problem("", "", f"{len(words):,} overrides are more than {_MOST_OVERRIDES:,}; write a recipe")]
    for word in words:
        readable = word.encode("utf-8", "backslashreplace").decode("utf-8")
        if readable != word:  # bytes of another encoding
            problems.append(Problem(readable, "", "is not UTF-8"))
            continue
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            problems.append(Problem(word, "", "is not an override; write --section.key=value"))
            continue
        key = tuple(match["key"].split("."))
        if key in parsed:
            problems.append(Problem(word, match["key"], f"is given twice; it was already set by {parsed[key][0]}"))
            continue
        parsed[key] = (word, match["value"])
    for key in (("stage",), ("model", "family")):
        if key in parsed:
            _put(tree, origins, key, parsed[key][1], parsed[key][0])
    cls, _ = recipe_type(tree, registry)
    types = {**dict.fromkeys(recipe_keys.sections(cls), Section), **_types(cls)}
    for key, (word, text) in parsed.items():
        value, problem = _override_value(text, types.get(key), word, key)
        if problem:
            problems.append(problem)
        elif blocked := _put(tree, origins, key, value, word):
            problems.append(Problem(word, ".".join(key), f"{'.'.join(blocked)} is a value, not a section"))
    return problems


def _override_value(text: str, annotation: Any, word: str, key: Key) -> tuple[Any, Problem | None]:
    quoted = len(text) >= 2 and text[0] == text[-1] == '"'
    listed = text.startswith("[") and recipe_keys.accepts_list(annotation)
    counted = _NUMBER.fullmatch(text) and recipe_keys.accepts_number(annotation)
    is_json = quoted or listed or counted or text == "null"
    if annotation is not None and recipe_keys.accepts_text(annotation) and not is_json:
        return text, None
    try:
        return parse_json(text, word).value, None
    except RecipeError as error:
        if annotation is None:  # an unknown key: that is the problem to report, not its value
            return text, None
        first = error.problems[0]
        where = f"{first.key}: " if first.key else ""
        note = "" if first.message.startswith("expected a value") else f" ({where}{first.message})"
        return None, Problem(word, ".".join(key), f"expected {_wanted(annotation)}, found {text!r}{note}")


def _put(tree: dict[str, Any], origins: dict[Key, str], key: Key, value: Any, origin: str) -> Key | None:
    """Set a value in a nested tree; returns the prefix that is in the way, if one is."""
    node = tree
    for depth, part in enumerate(key[:-1]):
        if part not in node:
            if value is REMOVE:
                return None
            node[part] = {}
            origins[key[: depth + 1]] = origin
        node = node[part]
        if not isinstance(node, dict):
            return key[: depth + 1]
    for old in [k for k in origins if k[: len(key)] == key]:
        del origins[old]
    if value is REMOVE:
        node.pop(key[-1], None)
    else:
        node[key[-1]] = value
        origins[key] = origin
    return None


def _bind(
    cls: type[Recipe], tree: dict[str, Any], loaded: LoadedRecipe, registry: Registry
) -> tuple[Recipe | None, list[Problem]]:
    try:
        typed = _adapter(cls)  # type: ignore[arg-type]  # a class has a hash, though its instances have none
        return typed.validate_json(json.dumps(tree)), []
    except ValidationError as error:
        problems = []
        types, hints_left = _types(cls), _MOST_HINTS
        for item in error.errors(include_url=False):
            if item["type"] in _UNKNOWN_KEY:
                hints_left -= 1
                if hints_left < 0:  # each costs a comparison with all known keys
                    key = tuple(map(str, item["loc"]))
                    problems.append(Problem(loaded.origin(key), ".".join(key), "unknown key"))
                    continue
            key = tuple(map(str, item["loc"]))
            if item["type"] not in _UNKNOWN_KEY:
                key = _without_alternatives(item["loc"], types)
            message = _explain(item, key, cls, types, tree, registry)
            if message is not None:
                problems.append(Problem(loaded.origin(key), ".".join(key), message))
        return None, problems


@functools.cache
def _adapter(cls: type[Recipe]) -> TypeAdapter[Recipe]:
    return TypeAdapter(cls)


def _types(cls: type[Recipe]) -> dict[Key, Any]:
    return {info.key: info.annotation for info in recipe_keys.walk(cls)}


_UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


def _without_alternatives(loc: tuple[int | str, ...], types: dict[Key, Any]) -> Key:
    """The place of a wrong value as a key: below a leaf, pydantic also names the alternative of a union it tried."""
    key = tuple(map(str, loc))
    leaf = next((n for n in range(len(key), 0, -1) if key[:n] in types), len(key))
    if _of_kind(types.get(key[:leaf]), dict):
        return key[: leaf + 1]
    return key[:leaf] + tuple(str(part) for part in loc[leaf:] if isinstance(part, int))


def _of_kind(annotation: Any, kind: type) -> list[Any]:
    """The alternatives of a type that are such containers."""
    return [found for found in (annotation, *typing.get_args(annotation)) if typing.get_origin(found) is kind]


def _explain(
    item: Any, key: Key, cls: type[Recipe], types: dict[Key, Any], tree: dict[str, Any], registry: Registry
) -> str | None:
    """An error of the type check as a message about a recipe."""
    kind, given = item["type"], item["input"]
    if kind in _UNKNOWN_KEY:
        stage_is_known = isinstance(tree.get("stage"), str) and tree["stage"] in registry.stages
        if len(key) == 1 and not stage_is_known and (key[0] in registry.stages or key[0] == tree.get("stage")):
            return None  # the stage's name is wrong and reported as such; its section may be right
        if len(key) == 1 and key[0] in registry.stages:
            return f"is the section of stage {key[0]!r}, which is not the stage of this recipe; remove it"
        if len(key) > 1 and stage_is_known and not registry.stages[tree["stage"]].trains and key in _of_training():
            return f"has no meaning for stage {tree['stage']!r}, which does not train; remove it"
        return f"unknown key; {recipe_keys.did_you_mean(key, cls)}".rstrip("; ")
    if kind in ("missing", "missing_argument"):
        return f"is required: {recipe_keys.describe(types[key]) if key in types else 'a section'}"
    if kind == "dataclass_type":
        return f"expected a section: {{...}}, found {_shown(given)}"
    if key in types:
        wanted = recipe_keys.describe(types[key])
    else:  # an item of a list or a mapping
        items = [typing.get_args(found)[-1] for kind in (list, dict) for found in _of_kind(types.get(key[:-1]), kind)]
        wanted = recipe_keys.describe(items[0]) if items else item["msg"]
    hint = ""
    if kind == "literal_error" and isinstance(given, str):
        options = [o.strip(" '") for o in item["ctx"]["expected"].replace(" or ", ", ").split(",")]
        near = difflib.get_close_matches(given, options, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected {wanted}, found {_shown(given)}{hint}"


def _shown(given: Any) -> str:
    text = json.dumps(given)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} … ({len(text):,} characters)"


@functools.cache
def _of_training() -> set[Key]:
    return {info.key for info in recipe_keys.walk(Recipe)}


def _wanted(annotation: Any) -> str:
    """A type in words; for types that the command line spells as JSON, with an example."""
    if annotation is Section:
        return 'a section, such as {"key": 1}'
    example = ', such as ["a", "b"]' if annotation == list[str] else ""
    return recipe_keys.describe(annotation) + example


def _section_rules(section: Section, prefix: str = "") -> list[tuple[str, str]]:
    found = [(prefix + key, message) for key, message in section.problems()]
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            found += _section_rules(value, f"{prefix}{field.name}.")
    return found


def _leaves(tree: Any, prefix: Key = ()) -> set[Key]:
    if not isinstance(tree, dict):
        return {prefix}
    return set().union(*(_leaves(value, (*prefix, key)) for key, value in tree.items()))
