"""Loading of recipes: from a file and command-line overrides to typed sections, with a check of every key and type.

All problems are collected and raised together, each with its position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import shlex
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmsuite.base.errors import Problem, RecipeError
from llmsuite.base.redaction import SECRETS
from llmsuite.base.suggestions import final_suggestion
from llmsuite.contract.registry import Registry, left_out
from llmsuite.contract.schema import keys as recipe_keys
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.recipe import Recipe, device_numbers
from llmsuite.contract.schema.section import Section, keys_in_vain, violated_rules
from llmsuite.recipe.document import other_suite_hint, read_document
from llmsuite.recipe.own_template import read_own_template
from llmsuite.recipe.problems import first_problems
from llmsuite.recipe.recipe_class import recipe_type
from llmsuite.recipe.source import Key, parse_json

_OVERRIDE = re.compile(r"--(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_][\w-]*)*)=(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_MAX_HINTS = 20
_MAX_OVERRIDES = 1000
_MAX_SHOWN = 200
"""Characters of a wrong value in a message."""


@dataclasses.dataclass
class LoadedRecipe:
    """A recipe with valid keys and types, and the origin of each value."""

    recipe: Recipe
    given: set[Key]
    """Leaf keys that the file or the command line sets."""
    origins: dict[Key, str]
    """Position of each given key: `FILE:LINE:COLUMN`, or the override."""
    name: str
    smoke_of: Degrees | None = None
    """Degrees of the original recipe in a `--smoke` run; None in other runs."""

    def origin(self, key: Key) -> str:
        """Return the position of a key, or of the nearest section that contains it."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, self.name)

    def problem(self, key: str, message: str) -> Problem:
        """Return a problem with a dotted key, at the position of the key."""
        return Problem(self.origin(tuple(key.split("."))), key, message)


def load(
    path: str | Path,
    overrides: Iterable[str],
    registry: Registry,
    layers: Iterable[tuple[str, dict[str, Any]]] = (),
) -> LoadedRecipe:
    """Read a recipe, apply `layers` and then the command line, and check the result.

    Args:
        path: JSON, JSONC or YAML file.
        overrides: `--a.b=c` words; values are JSON, or bare text where the type of the key allows text.
        registry: registered stages, model families, devices …
        layers: (origin, {dotted key: value or REMOVE}), applied after the file and before the command line.

    Raises:
        RecipeError: with every problem found.
    """
    source = read_document(path)
    if not isinstance(source.value, dict):
        raise RecipeError([Problem(f"{path}:1:1", "", "a recipe is an object: {...}, or in YAML key: value")])
    hint = other_suite_hint(source.value)
    if hint is not None:
        raise RecipeError([Problem(f"{path}:1:1", "", hint)])
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
        problems += [loaded.problem(key, message) for key, message in violated_rules(recipe)]
        problems += _keys_in_vain(loaded)
        problems += [loaded.problem(key, message) for key, message in read_own_template(recipe, str(path))]
    if problems:
        raise RecipeError(first_problems(problems))
    return loaded


def _count_devices(tree: dict[str, Any], origins: dict[Key, str]) -> None:
    """Set num_devices from a list of devices, unless it is given; a number in the file gives way to devices on the
    command line."""
    launch = tree.get("launch")
    key = ("launch", "num_devices")
    if not isinstance(launch, dict):
        return
    with contextlib.suppress(ValueError, TypeError):  # a wrong type is reported by the type check
        numbers = device_numbers(launch.get("devices"))
        origin = origins.get(("launch", "devices"), "")
        overridden = origin.startswith("--") and not origins.get(key, "--").startswith("--")
        if numbers is not None and ("num_devices" not in launch or overridden):
            _put(tree, origins, key, len(numbers), origin or origins[("launch",)])


REMOVE = object()
"""Value in a layer that removes the key."""


def _apply_overrides(
    tree: dict[str, Any], origins: dict[Key, str], overrides: Iterable[str], registry: Registry
) -> list[Problem]:
    """Write the overrides into the tree. Those of stage and family come first: the types of other keys depend on
    them."""
    problems: list[Problem] = []
    parsed: dict[Key, tuple[str, str]] = {}
    words = list(overrides)
    if len(words) > _MAX_OVERRIDES:
        return [Problem("", "", f"{len(words):,} overrides are more than {_MAX_OVERRIDES:,}; write a recipe")]
    for word in words:
        readable = word.encode("utf-8", "backslashreplace").decode("utf-8")
        if readable != word:  # surrogate escapes: not UTF-8 on the command line
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
            continue
        blocked = _put(tree, origins, key, value, word)
        if blocked:
            problems.append(Problem(word, ".".join(key), f"{'.'.join(blocked)} is a value, not a section"))
    return problems


def _override_value(text: str, annotation: Any, word: str, key: Key) -> tuple[Any, Problem | None]:
    quoted = len(text) >= 2 and text[0] == text[-1] == '"'
    listed = text.startswith("[") and recipe_keys.accepts_list(annotation)
    counted = _NUMBER.fullmatch(text) and recipe_keys.accepts_number(annotation)
    mapped = text.startswith("{") and recipe_keys.accepts_object(annotation)
    is_json = quoted or listed or counted or mapped or text == "null"
    if annotation is not None and recipe_keys.accepts_text(annotation) and not is_json:
        return text, None
    try:
        return parse_json(text, word).value, None
    except RecipeError as error:
        if annotation is None:  # the key is unknown, which is reported instead of its value
            return text, None
        first = error.problems[0]
        where = f"{first.key}: " if first.key else ""
        note = "" if first.message.startswith("expected a value") else f" ({where}{first.message})"
        return None, Problem(word, ".".join(key), f"expected {_expected(annotation)}, found {text!r}{note}")


def _put(tree: dict[str, Any], origins: dict[Key, str], key: Key, value: Any, origin: str) -> Key | None:
    """Set a value in a nested tree. Return the prefix of the key that is a value instead of a section, if any."""
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
        typed = _adapter(cls)  # type: ignore[arg-type]  # classes are hashable, although their instances are not
        return typed.validate_json(json.dumps(tree)), []
    except ValidationError as error:
        problems = []
        found: set[tuple[Key, str]] = set()
        types = _types(cls)
        hints_left = _MAX_HINTS
        for item in error.errors(include_url=False):
            if item["type"] in _UNKNOWN_KEY:
                hints_left -= 1
                if hints_left < 0:  # a hint is slow: it compares the key with all known keys
                    key = tuple(map(str, item["loc"]))
                    problems.append(Problem(loaded.origin(key), ".".join(key), "unknown key"))
                    continue
            key = tuple(map(str, item["loc"]))
            if item["type"] not in _UNKNOWN_KEY:
                key = _without_alternatives(item["loc"], types)
            message = _explain(item, key, cls, types, tree, registry)
            if message is not None and (key, message) not in found:  # alternatives of a union have the same one
                found.add((key, message))
                problems.append(Problem(loaded.origin(key), ".".join(key), message))
        return None, problems


@functools.cache
def _adapter(cls: type[Recipe]) -> TypeAdapter[Recipe]:
    return TypeAdapter(cls)


def _types(cls: type[Recipe]) -> dict[Key, Any]:
    return {info.key: info.annotation for info in recipe_keys.walk(cls)}


_UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


def _without_alternatives(loc: tuple[int | str, ...], types: dict[Key, Any]) -> Key:
    """Return the key of a wrong value. Below a leaf, pydantic's location also names the alternative of a union; drop
    it."""
    key = tuple(map(str, loc))
    leaf = next((n for n in range(len(key), 0, -1) if key[:n] in types), len(key))
    annotation = types.get(key[:leaf])
    rest = loc[leaf:]
    if sum(found is not type(None) for found in typing.get_args(annotation)) > 1 and _is_union(annotation):
        rest = rest[1:]
    if _of_kind(annotation, dict):
        return key[:leaf] + tuple(map(str, rest[:1]))
    return key[:leaf] + tuple(str(part) for part in rest if isinstance(part, int))


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, UnionType)


def _of_kind(annotation: Any, kind: type) -> list[Any]:
    """Return the alternatives of a type that are containers of a kind."""
    return [found for found in (annotation, *typing.get_args(annotation)) if typing.get_origin(found) is kind]


def _explain(
    item: Any, key: Key, cls: type[Recipe], types: dict[Key, Any], tree: dict[str, Any], registry: Registry
) -> str | None:
    """Return a message for an error of pydantic; None if another problem already reports its cause."""
    kind = item["type"]
    given = item["input"]
    if kind in _UNKNOWN_KEY:
        stage_is_known = isinstance(tree.get("stage"), str) and tree["stage"] in registry.stages
        if len(key) == 1 and not stage_is_known and (key[0] in registry.stages or key[0] == tree.get("stage")):
            return None  # the unknown stage is reported; this may be its section
        if len(key) == 1 and key[0] in registry.stages:
            return f"is the section of stage {key[0]!r}, which is not the stage of this recipe; remove it"
        if len(key) > 1 and stage_is_known and not registry.stages[tree["stage"]].trains and key in _training_keys():
            return f"has no meaning for stage {tree['stage']!r}, which does not train; remove it"
        return f"unknown key; {recipe_keys.did_you_mean(key, cls)}".rstrip("; ")
    if kind in ("missing", "missing_argument"):
        return f"is required: {recipe_keys.describe(types[key]) if key in types else 'a section'}"
    if kind == "dataclass_type":
        return f"expected a section: {{...}}, found {_shown(given)}"
    if key in types:
        expected = recipe_keys.describe(types[key])
    else:  # an item of a list or a mapping
        containers = [found for kind in (list, dict) for found in _of_kind(types.get(key[:-1]), kind)]
        expected = item["msg"]
        if containers:
            expected = recipe_keys.describe(typing.get_args(containers[0])[-1])
    hint = ""
    if key == ("lora", "method") and isinstance(given, str) and given in left_out("adapter method"):
        return registry.unknown("adapter method", given)
    if kind == "literal_error" and isinstance(given, str):
        options = [o.strip(" '") for o in item["ctx"]["expected"].replace(" or ", ", ").split(",")]
        hint = final_suggestion(given, options)
    return f"expected {expected}, found {_shown(given)}{hint}"


def _shown(given: Any) -> str:
    text = json.dumps(given)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]} … ({len(text):,} characters)"


@functools.cache
def _training_keys() -> set[Key]:
    return {info.key for info in recipe_keys.walk(Recipe)}


def _expected(annotation: Any) -> str:
    """Return a type in words; with an example for types that are written as JSON on the command line."""
    if annotation is Section:
        return 'a section, such as {"key": 1}'
    example = ""
    if annotation == list[str]:
        example = ', such as ["a", "b"]'
    return recipe_keys.describe(annotation) + example


def _keys_in_vain(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield a problem for each key that is set and has no effect.

    An override cannot take a key out of the file. So the message names the override that sets it to its default, which
    counts as not set.
    """
    defaults = {info.key: info.default for info in recipe_keys.walk(type(loaded.recipe))}
    for key, reason in keys_in_vain(loaded.recipe):
        dotted = ".".join(key)
        default = defaults[key]
        hint = ""
        if reason.endswith("remove it") and default is not dataclasses.MISSING:
            text = default if isinstance(default, str) else json.dumps(default)
            hint = f", or set it to its default: {shlex.quote(f'--{dotted}={text}')}"
        yield loaded.problem(dotted, reason + hint)


def _leaves(tree: Any, prefix: Key = ()) -> set[Key]:
    if not isinstance(tree, dict):
        return {prefix}
    return set().union(*(_leaves(value, (*prefix, key)) for key, value in tree.items()))
