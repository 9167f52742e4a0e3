"""Checks of the plugins that a recipe uses, before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.contract.given import plugin_from_specs
from llmsuite.contract.hookspecs import DataFormat, DeviceSpec, ModelFamily, Section, StageSpec
from llmsuite.models.plain import PlainNames, PlainShape
from llmsuite.recipe.resolve import plan_run
from tests.conftest import registry_with

Write = Callable[..., Path]


def problems(path: Path, *specs: Any) -> list[tuple[str, str]]:
    """Return the problems of a recipe if a plugin registers these specs."""
    with pytest.raises(RecipeError) as caught:
        plan_run(path, [], registry_with(own=plugin_from_specs(specs)))
    return [(problem.key, problem.message) for problem in caught.value.problems]


def stage(kind: str) -> StageSpec:
    return StageSpec(name="ranking", help="", config_cls=Section, factory=lambda: object, row_kind=kind)


RANKED = DataFormat(
    name="ranking_rows", help="answers", kind="ranking", matches=lambda row: "answers" in row, convert=lambda row: row
)


def test_a_format_gives_the_rows_of_the_stage(write_recipe: Write, plan: Callable[..., Any]) -> None:
    assert plan({"data.format": "trl_preference"})
    found = problems(write_recipe({"data.format": "openai"}))
    message = "openai has conversation rows, but stage dpo trains on preference rows; choose auto or one of: "
    ((key, said),) = found
    assert key == "data.format"
    assert said.startswith(message)
    assert "trl_preference" in said


def test_a_stage_with_rows_of_its_own(write_recipe: Write) -> None:
    path = write_recipe({"stage": "ranking"})
    plan_run(path, [], registry_with(own=plugin_from_specs([stage("ranking"), RANKED])))
    ((key, said),) = problems(path, stage("rankings"), RANKED)
    assert key == "stage"
    assert said.startswith("ranking trains on rankings rows, but no data format has such rows; known kinds: conver")
    chosen = write_recipe({"stage": "ranking", "data.format": "ranking_rows"})
    plan_run(chosen, [], registry_with(own=plugin_from_specs([stage(""), RANKED])))  # it is asked when it reads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(PlainShape):
    model_type = "mine"

    width: int = 4
    """Size of a vector."""


def family_with(names: Callable[[], Any]) -> ModelFamily:
    """A family of `Shape` without presets."""
    fields: dict[str, Any] = {"config_cls": Shape, "presets": {}, "smoke": {}, "hf_model_types": ("mine",)}
    return ModelFamily(name="mine", help="", factory=lambda: object, names=names, **fields)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (None, "parameter_names, is_linear, hf_tensors, from_hf, paddlenlp_prefix"),
        (
            SimpleNamespace(**dict.fromkeys(("parameter_names", "hf_tensors", "from_hf"), id)),
            "is_linear, paddlenlp_pre",
        ),
    ],
)
def test_names_of_parameters(write_recipe: Write, names: Any, missing: str) -> None:
    family = family_with(lambda: names)
    path = write_recipe({"stage": "pretrain", "model": {"family": "mine", "config": {"width": 8}}})
    ((key, said),) = problems(path, family)
    assert key == "model.family"
    assert said.startswith("`names` of 'mine' returned ")
    assert f"which has no function {missing}" in said
    full = dataclasses.replace(family, names=lambda: PlainNames(lambda config: ["w"]))
    plan_run(path, [], registry_with(own=plugin_from_specs([full])))


def test_a_family_without_presets(write_recipe: Write) -> None:
    family = family_with(lambda: PlainNames(lambda config: ["w"]))
    changes = {"stage": "pretrain", "model": {"family": "mine", "preset": "llama-7b"}}
    assert problems(write_recipe(changes), family) == [
        ("model.preset", "family mine has no preset 'llama-7b'; known: none")
    ]


@pytest.mark.parametrize("backend", [None, object()])
def test_a_device_that_is_none(write_recipe: Write, backend: Any) -> None:
    device = DeviceSpec(name="mine", help="", factory=lambda: backend)
    ((key, said),) = problems(write_recipe({"device": "mine"}), device)
    assert key == "device"
    assert said == (
        f"the factory of 'mine' returned {backend!r}; it has to return an object derived from "
        "llmsuite.devices.base.DeviceBackend"
    )
    plan_run(write_recipe(), [], registry_with(own=plugin_from_specs([device])))
