"""The JSON Schema of recipes, with which editors complete and check them."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.keys import field_docs, section_doc, sections
from llmsuite.recipe.recipe_class import recipe_type


def recipe_schema(registry: Registry, stage: str | None = None) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of the recipes of one stage, or of all stages.

    A stage decides what sections there are, a family what `model.config` holds, and neither depends on the other: so
    the schema has one alternative for each stage, and `model` one for each family.
    """
    stages = [stage] if stage else registry.stages
    definitions = {"model": {"anyOf": [_model_schema(registry, family) for family in registry.models]}}
    alternatives = [_stage_schema(registry, name, definitions) for name in stages]
    schema = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "llmsuite recipe"}
    return {**head, **schema, "$defs": definitions}


def _model_schema(registry: Registry, family: str) -> dict[str, Any]:
    cls, _ = recipe_type({"model": {"family": family}}, registry)
    schema = _schema_of(sections(cls)["model",])
    schema["properties"]["family"]["const"] = family
    return {"title": family, **schema}


def _stage_schema(registry: Registry, stage: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the recipes of a stage. Its sections become `definitions`, one for all stages that agree."""
    cls, _ = recipe_type({"stage": stage}, registry)
    schema = _schema_of(cls)
    keys = schema["properties"]
    keys["stage"]["const"] = stage
    keys["model"] = {"$ref": "#/$defs/model", "description": keys["model"]["description"]}
    for (name,) in [key for key in sections(cls) if len(key) == 1 and key != ("model",)]:
        if definitions.setdefault(name, keys[name]) == keys[name]:
            keys[name] = {"$ref": f"#/$defs/{name}"}
    return {"title": stage, **schema}


def _schema_of(cls: type) -> dict[str, Any]:
    schema = TypeAdapter(cls).json_schema(ref_template="#/$defs/{model}", schema_generator=_WithDocstrings)
    schema = _inlined(schema, schema.pop("$defs", {}))
    for key, section in sections(cls).items():
        node: dict[str, Any] = schema
        for part in key:
            node = node["properties"][part]
        doc = section_doc(section)
        if doc:
            node["description"] = doc
    return schema


class _WithDocstrings(GenerateJsonSchema):
    """Generator that describes each key by the docstring under its field.

    Pydantic's own `use_attribute_docstrings` parses the sources whenever a recipe is checked, which takes longer than
    the check itself.
    """

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _described(super().dataclass_schema(schema), schema["cls"])

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        return _described(super().typed_dict_schema(schema), schema["cls"])


def _described(schema: JsonSchemaValue, cls: type) -> JsonSchemaValue:
    docs = field_docs(cls)
    for name, of_key in schema["properties"].items():
        if name in docs:
            of_key["description"] = docs[name]
    return schema


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema with its references replaced by their targets: the same type has different descriptions at
    different keys, and types are not recursive."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        return _inlined({**target, **{k: v for k, v in node.items() if k != "$ref"}}, definitions)
    return {k: _inlined(v, definitions) for k, v in node.items() if k != "title" or not isinstance(v, str)}
