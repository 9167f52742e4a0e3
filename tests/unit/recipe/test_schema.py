"""The types of a recipe: what may be in them, that every key is documented, and their JSON Schema."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import jsonschema
import pytest
from typing_extensions import is_typeddict

from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.keys import field_docs, section_doc, sections, walk
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.section import Section, as_plain
from llmsuite.recipe.recipe_class import recipe_type
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.schema_json import recipe_schema
from tests.conftest import VALID

RECIPES = sorted(bundled("recipes").glob("*/*.json"))
ids = {"ids": lambda p: f"{p.parent.name}/{p.name}"}


def recipe_types(registry: Registry) -> Iterator[type[Recipe]]:
    """The recipe without its stage and family, and those of each stage and of each family."""
    yield Recipe
    for stage in registry.stages:
        for family in registry.models if stage == "dpo" else ("llama",):
            cls, problems = recipe_type({"stage": stage, "model": {"family": family}}, registry)
            assert problems == []
            yield cls


def parts(annotation: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every type inside a type, down to the fields of sections and the items of lists, with where it is."""
    yield path, annotation
    if (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)) or is_typeddict(annotation):
        hints = typing.get_type_hints(annotation, include_extras=True)
        names = hints if is_typeddict(annotation) else {f.name: None for f in dataclasses.fields(annotation)}
        for name in names:
            yield from parts(hints[name], f"{path}.{name}")
    elif typing.get_origin(annotation) is Annotated:
        yield from parts(typing.get_args(annotation)[0], path)
    elif typing.get_origin(annotation) is not Literal:
        for inner in typing.get_args(annotation):
            yield from parts(inner, path)


def test_types_are_plain_data(registry: Registry) -> None:
    """Nothing a recipe could use to name code: no Any, no callable, no class, no unknown container."""
    plain = (int, float, str, bool, type(None))
    anything = set()
    for cls in recipe_types(registry):
        for path, annotation in parts(cls, "recipe"):
            origin = typing.get_origin(annotation)
            if annotation is Any:
                anything.add(path)
                continue
            is_section = isinstance(annotation, type) and issubclass(annotation, Section)
            allowed = (Annotated, Literal, Union, types.UnionType, list, dict)
            assert annotation in plain or is_section or is_typeddict(annotation) or origin in allowed, path
            if origin is dict:  # what it holds is looked at like anything else: Any is noted above
                assert typing.get_args(annotation)[0] is str, path
    # JSON that one component reads and checks itself: the base class does not know the family yet, nor that of a
    # teacher, and rope_scaling is checked by LlamaConfig.problems
    assert anything <= {"recipe.gkd.teacher_config", "recipe.model.config", "recipe.model.config.rope_scaling"}
    typed = {path for cls in list(recipe_types(registry))[1:] for path, part in parts(cls, "recipe") if part is Any}
    assert "recipe.model.config" not in typed


@pytest.mark.parametrize(
    "bad", [Any, collections.abc.Callable, type, list[Any], dict[str, type[int]] | None, Annotated[Any, 1]]
)
def test_the_walk_finds_forbidden_types(bad: Any) -> None:
    outer = dataclasses.make_dataclass("Outer", [("inner", dataclasses.make_dataclass("Inner", [("x", bad)]))])
    found = [part for path, part in parts(outer, "o") if path == "o.inner.x"]
    assert {Any, collections.abc.Callable, type, type[int]} & set(found)


def test_every_field_is_documented(registry: Registry) -> None:
    for cls in recipe_types(registry):
        for info in walk(cls):
            assert len(info.doc) > 5, info.dotted
            assert "\n" not in info.doc
        for key, section in sections(cls).items():
            assert len(section_doc(section)) > 5, key
    assert field_docs(Recipe)["seed"].startswith("Random seed of the initial parameters")
    for spec in registry.stages.values():  # as the contract for third parties asks: sections within a section too
        docs = field_docs(spec.config_cls)
        assert [f.name for f in dataclasses.fields(spec.config_cls) if not docs.get(f.name)] == [], spec.name


@pytest.fixture(scope="module")
def schema(registry: Registry) -> dict[str, Any]:
    return recipe_schema(registry)


@pytest.fixture(scope="module")
def of_stages(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The alternative of each stage alone, of which there are fewer to compare a recipe with."""
    return {alternative["title"]: {**schema, "anyOf": [alternative]} for alternative in schema["anyOf"]}


def errors(schema: dict[str, Any], tree: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(tree)]


def test_is_a_schema(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert len(json.dumps(schema, allow_nan=False)) < 500_000  # an editor reads it at each start
    jsonschema.Draft202012Validator.check_schema(schema)


def test_a_stage_has_its_alternative(
    of_stages: dict[str, dict[str, Any]], schema: dict[str, Any], registry: Registry
) -> None:
    one = recipe_schema(registry, "dpo")
    (alternative,) = of_stages["dpo"]["anyOf"]
    assert {key: one[key] for key in alternative if key != "title"} == {
        key: alternative[key] for key in alternative if key != "title"
    }
    assert {name: schema["$defs"][name] for name in one["$defs"]} == one["$defs"]


@pytest.mark.parametrize("path", RECIPES, **ids)
def test_shipped_recipe_obeys_it(schema: dict[str, Any], path: Path) -> None:
    assert errors(schema, json.loads(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("path", RECIPES, **ids)
def test_resolved_recipe_obeys_it(
    of_stages: dict[str, dict[str, Any]], registry: Registry, path: Path, smoke: bool
) -> None:
    recipe = plan_run(path, [], registry, smoke).recipe
    assert errors(of_stages[recipe.stage], as_plain(recipe)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nothing", 1),
        ("train.max_step", 1),
        ("model.config.hidden_sise", 1),
        ("dpo.betta", 1),
        ("train.max_steps", "1"),
        ("train.max_steps", 0),
        ("train.warmup_ratio", 1.5),
        ("dpo.label_smoothing", 0.5),
        ("dpo.loss", "sigmoidal"),
        ("stage", "no_such_stage"),
        ("model.family", "no_such_family"),
        ("model.config.hidden_size", "64"),
        ("loggers", "visualdl"),
        ("data", 5),
        ("output_dir", None),
    ],
)
def test_wrong_recipe_does_not_obey_it(schema: dict[str, Any], key: str, value: Any) -> None:
    tree = copy.deepcopy(VALID)
    assert errors(schema, tree) == []
    node = tree
    *around, last = key.split(".")
    for part in around:
        node = node.setdefault(part, {})
    node[last] = value
    assert errors(schema, tree)


def test_required_keys(schema: dict[str, Any]) -> None:
    for key in VALID:
        assert errors(schema, {k: v for k, v in VALID.items() if k != key}), key


def test_every_field_has_its_description(registry: Registry) -> None:
    cls, _ = recipe_type({"stage": "dpo", "model": {"family": "llama"}}, registry)
    schema = recipe_schema(registry, "dpo")
    docs = {info.key: info.doc for info in walk(cls)}
    docs.update((key, section_doc(section)) for key, section in sections(cls).items())
    assert len(docs) > 50
    assert docs["model",] == "The model, and the sources of its weights and tokenizer."
    for key, doc in docs.items():
        node = schema
        for part in key:
            node = node["properties"][part]
            if "$ref" in node:
                target = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
                node = {**target, **node}
            if part == "model":
                (of_family,) = [one for one in node["anyOf"] if one["title"] == "llama"]
                node = {**of_family, **node}
        assert node["description"] == doc, key


def test_alternatives_are_named(schema: dict[str, Any], registry: Registry) -> None:
    stages = [alternative["properties"]["stage"]["const"] for alternative in schema["anyOf"]]
    assert stages == [alternative["title"] for alternative in schema["anyOf"]] == list(registry.stages)
    families = [alternative["properties"]["family"]["const"] for alternative in schema["$defs"]["model"]["anyOf"]]
    assert families == list(registry.models)
