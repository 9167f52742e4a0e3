"""No slip in a shipped recipe goes unnoticed: every key is spoilt in turn, for each stage that has it in a recipe, and
the key is pointed at.

Nothing here lists keys or recipes: both are read off the files and the types.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pytest
from typing_extensions import is_typeddict

from llmsuite.base.errors import Problem, RecipeError
from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.keys import sections, walk
from llmsuite.recipe.recipe_class import recipe_type
from llmsuite.recipe.resolve import plan_run

Key = tuple[str, ...]
ROOT = bundled("recipes")


def _with_all_keys() -> dict[str, set[Key]]:
    """Recipes that have between them each key of a stage that any has, with the keys that each is the first to have."""
    chosen = {}
    seen = set[tuple[str, Key]]()
    for path in sorted(ROOT.glob("*/*.json")):
        tree = json.loads(path.read_text(encoding="utf-8"))
        keys = {(tree["stage"], key) for key in _paths(tree)} - seen
        if keys:
            chosen[str(path.relative_to(ROOT))] = {key for _, key in keys}
            seen |= keys
    return chosen


def _paths(node: Any, prefix: Key = ()) -> Iterator[Key]:
    for name, value in node.items() if isinstance(node, dict) else ():
        yield (*prefix, name)
        yield from _paths(value, (*prefix, name))


RECIPES = _with_all_keys()
OUTLINE = "outline of a section"
HERE = "@here@"


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tree(recipe: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / recipe).read_text(encoding="utf-8"))
    return loaded


@pytest.fixture
def annotations(tree: dict[str, Any], registry: Registry) -> dict[Key, Any]:
    """The type of each key the recipe has, OUTLINE for a section."""
    cls, _ = recipe_type(tree, registry)
    known = {**{info.key: info.annotation for info in walk(cls)}, **dict.fromkeys(sections(cls), OUTLINE)}
    known = {key: OUTLINE if is_typeddict(annotation) else annotation for key, annotation in known.items()}

    def written(node: dict[str, Any], prefix: Key = ()) -> Iterator[Key]:
        for name, value in node.items():
            yield (*prefix, name)
            if known[(*prefix, name)] is OUTLINE:
                yield from written(value, (*prefix, name))

    return {key: known[key] for key in written(tree)}


@pytest.fixture
def new(recipe: str, annotations: dict[Key, Any]) -> dict[Key, Any]:
    """Those of the keys that no recipe before has of this stage."""
    return {key: annotation for key, annotation in annotations.items() if key in RECIPES[recipe]}


Check = Callable[..., None]


@pytest.fixture
def check(tree: dict[str, Any], registry: Registry, tmp_path: Path) -> Check:
    """Spoils one key and asserts that it is pointed at.

    Its arguments: the key, what is written in its place as name and as value (JSON text), how the message begins,
    and the value it is given a second time, if it is: then that is what has to be pointed at.
    """
    path = tmp_path / "recipe.json"

    def run(key: Key, name: str, value: str, message: str, second: str | None = None) -> None:
        before, _, after = json.dumps(spoilt(tree, key, name), indent=2).partition(f'"{name}": "{HERE}"')
        if second is not None:
            before += f'"{name}": {value},\n   '
            value = second
        path.write_text(f'{before}"{name}": {value}{after}', encoding="utf-8")
        where = f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        found = problems_of(path, registry)
        at_key = [p.message for p in found if (p.where, p.key) == (where, ".".join((*key[:-1], name)))]
        assert any(m.startswith(message) for m in at_key), f"{'.'.join(key)} as {name}: {value[:80]}: {found}"

    return run


def problems_of(path: Path, registry: Registry) -> list[Problem]:
    try:
        plan_run(path, [], registry)
    except RecipeError as error:
        return error.problems
    return []


def spoilt(node: dict[str, Any], key: Key, name: str) -> dict[str, Any]:
    """A copy with the key's name replaced and a mark for its value, everything in its old order."""
    if len(key) == 1:
        return {(name if k == key[0] else k): (HERE if k == key[0] else v) for k, v in node.items()}
    return {k: spoilt(v, key[1:], name) if k == key[0] else v for k, v in node.items()}


def value_of(tree: dict[str, Any], key: Key) -> str:
    node: Any = tree
    for part in key:
        node = node[part]
    return json.dumps(node)


def accepts(annotation: Any, value: Any) -> bool:
    """Return True if a key of this type may have the value, without any conversion."""
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if annotation is OUTLINE or annotation is dict or origin is dict:
        return isinstance(value, dict)
    if origin is Annotated:
        return accepts(inner[0], value) and all(holds(limit, value) for limit in inner[1:])
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if origin in (Union, types.UnionType):
        return any(accepts(option, value) for option in inner)
    if origin is list:
        return isinstance(value, list) and all(accepts(inner[0], item) for item in value)
    assert annotation in (int, float, str, bool, type(None)), annotation
    return type(value) in ((int, float) if annotation is float else (annotation,))


def holds(limit: Any, value: Any) -> bool:
    (name,) = [field.name for field in dataclasses.fields(limit)]
    bound = getattr(limit, name)
    return bool({"gt": value > bound, "ge": value >= bound, "lt": value < bound, "le": value <= bound}[name])


def beyond(annotation: Any) -> Iterator[Any]:
    """Values just outside the limits of a type, and a word that is none of its options."""
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    if origin is Annotated:
        step = 1 if inner[0] is int else 0.001
        for limit in inner[1:]:
            (name,) = [field.name for field in dataclasses.fields(limit)]
            bound = getattr(limit, name)
            yield {"gt": bound, "ge": bound - step, "lt": bound, "le": bound + step}[name]
    elif origin is Literal:
        yield f"{inner[0]}x"
    elif origin in (Union, types.UnionType):
        for option in inner:
            yield from (value for value in beyond(option) if not accepts(annotation, value))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 2


def test_every_recipe_is_valid_as_it_is(
    tree: dict[str, Any], annotations: dict[Key, Any], registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(tree))
    plan_run(tmp_path / "recipe.json", [], registry)
    assert len(annotations) >= 20
    assert sum(bool([*beyond(annotation)]) for annotation in annotations.values()) >= 5
    for key, annotation in annotations.items():
        assert accepts(annotation, json.loads(value_of(tree, key))), key


def test_a_typo_in_a_key_is_reported(tree: dict[str, Any], new: dict[Key, Any], check: Check) -> None:
    for key in new:
        name = key[-1]
        for typo in {f"{name}x", name[:-1], name[1:] + name[0], name.upper()} - {name, ""}:
            check(key, typo, value_of(tree, key), "unknown key")


def test_wrong_type(new: dict[Key, Any], check: Check) -> None:
    for key, annotation in new.items():
        wrong = [v for v in (True, 1, 1.5, "1", None, [], {"x": 1}) if not accepts(annotation, v)]
        assert wrong, key
        for value in wrong:
            if annotation is OUTLINE and isinstance(value, dict):
                continue
            check(key, key[-1], json.dumps(value), "expected ")


def test_out_of_range(new: dict[Key, Any], check: Check) -> None:
    for key, annotation in new.items():
        for value in beyond(annotation):
            assert not accepts(annotation, value)
            check(key, key[-1], json.dumps(value), "expected ")


def test_given_twice(tree: dict[str, Any], new: dict[Key, Any], check: Check) -> None:
    for key in new:
        value = value_of(tree, key)
        for second in (value, "null"):
            check(key, key[-1], value, "is given twice; it was already set at ", second)


def test_file_with_many_slips(
    tree: dict[str, Any], annotations: dict[Key, Any], registry: Registry, tmp_path: Path
) -> None:
    """Typos in all leaves of all sections in one recipe: each is reported."""
    leaves = [key for key, annotation in annotations.items() if annotation is not OUTLINE and len(key) > 1]
    text = json.dumps(tree, indent=2)
    for name in {key[-1] for key in leaves} - {key[0] for key in annotations}:
        text = text.replace(f'"{name}": ', f'"{name}x": ')
    path = tmp_path / "recipe.json"
    path.write_text(text)
    unknown = [p for p in problems_of(path, registry) if p.message.startswith("unknown key")]
    # of a shape nothing is known without its family
    known = [key for key in leaves if key[:2] != ("model", "config")]
    expected = [".".join(key) + "x" for key in known if f'"{key[-1]}x": ' in text]
    assert [p.key for p in unknown] == expected
