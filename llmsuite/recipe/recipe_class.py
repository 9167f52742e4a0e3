"""The class of a recipe with the sections of its stage and the shape of its family: what keys a recipe may have.

Imports little: the completion of a command line asks for the keys at each press of Tab.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

from llmsuite.adapters.methods import BUILT_IN
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema import keys as recipe_keys
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.contract.schema.recipe import ModelSection, Recipe
from llmsuite.contract.schema.section import Section
from llmsuite.recipe.inference_sections import SECTIONS


def recipe_type(tree: dict[str, Any], registry: Registry) -> tuple[type[Recipe], list[tuple[str, str]]]:
    """Return the recipe class for the stage and family in a document, and (key, message) for each unknown name."""
    problems: list[tuple[str, str]] = []
    stage = tree.get("stage")
    family = None
    if isinstance(tree.get("model"), dict):
        family = tree["model"].get("family")
    if isinstance(stage, str) and stage not in registry.stages:
        problems.append(("stage", registry.unknown("stage", stage)))
        stage = None
    if isinstance(family, str) and family not in registry.models:
        problems.append(("model.family", registry.unknown("model", family)))
        family = None
    stage_spec = None
    if isinstance(stage, str):
        stage_spec = registry.stages[stage]
    family_spec = None
    if isinstance(family, str):
        family_spec = registry.models[family]
    sections = stage_spec.all_sections.values() if stage_spec is not None else ()
    kinds = sorted({section.extended_by for section in sections} - {""})
    extensions = [(kind, spec) for kind in kinds for spec in registry.specs(kind).values()]
    added = tuple(name for name, method in registry.adapter_methods.items() if method not in BUILT_IN)
    return _typed_recipe(stage_spec, family_spec, tuple(extensions), added), problems


@functools.cache
def _typed_recipe(
    stage: Any, family: Any, specs: tuple[tuple[str, Any], ...], adapters: tuple[str, ...]
) -> type[Recipe]:
    fields: list[Any] = []
    if adapters and (stage is None or stage.trains):  # others have no adapters
        lora = _lora_section(adapters)
        fields.append(("lora", lora, dataclasses.field(default_factory=lora)))
    if family is not None:
        model = dataclasses.make_dataclass(
            "ModelSection",
            [("config", family.config_keys(), dataclasses.field(default_factory=dict))],
            bases=(ModelSection,),
            kw_only=True,
        )
        fields.append(("model", model))
    if stage is not None:
        sections = {name: _extended(section, specs) for name, section in stage.all_sections.items()}
        fields += [(name, section, _default_of(section)) for name, section in sections.items()]
        replaced = {} if stage.trains else SECTIONS
        for name, section in replaced.items():
            default = dataclasses.field(default_factory=section) if name != "data" else dataclasses.field()
            fields.append((name, section, default))
    return dataclasses.make_dataclass("Recipe", fields, bases=(Recipe,), kw_only=True)


def _lora_section(adapters: tuple[str, ...]) -> type[LoraSection]:
    """Return the section `lora` whose key `method` takes these methods of plugins too."""
    names = (*typing.get_args(recipe_keys.type_hints(LoraSection)["method"]), *adapters)
    literal: Any = typing.Literal  # type checkers accept only literal values
    method = ("method", literal[names], dataclasses.field(default="lora"))
    made = dataclasses.make_dataclass("LoraSection", [method], bases=(LoraSection,), kw_only=True)
    made.__doc__ = LoraSection.__doc__
    return made


def _default_of(section: type[Section]) -> Any:
    """Return the dataclass field for a section; it has no default if the section has a required key."""
    required = any(
        f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        for f in dataclasses.fields(section)
    )
    if required:
        return dataclasses.field()
    return dataclasses.field(default_factory=section)


def _extended(section: type[Section], specs: tuple[tuple[str, Any], ...]) -> type[Section]:
    """Return a section with the keys of the specs that extend it, such as those of each reward below `reward`; other
    sections unchanged."""
    own = [spec for kind, spec in specs if kind == section.extended_by and spec.config_cls]
    if not own:
        return section
    fields = [(spec.name, spec.config_cls, _default_of(spec.config_cls)) for spec in own]
    made = dataclasses.make_dataclass(section.__name__, fields, bases=(section,), kw_only=True)
    made.__doc__ = section.__doc__
    return made
