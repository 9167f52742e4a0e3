"""The specs of stages and jobs: few fields, the names of capabilities, and the sections of their recipes."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from llmsuite.contract.hookspecs import JobSpec, Section, StageSpec
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import CAPABILITIES, Capability


class OneSection(Section):
    pass


class OtherSection(Section):
    pass


def stage(**given: Any) -> StageSpec:
    return StageSpec(name="spin", help="", config_cls=OneSection, factory=lambda: object, **given)


def test_a_spec_has_few_fields() -> None:
    assert len(dataclasses.fields(StageSpec)) <= 10
    assert len(dataclasses.fields(JobSpec)) <= 10


def test_every_capability_has_a_meaning() -> None:
    assert tuple(CAPABILITIES) == typing.get_args(Capability)
    assert all(CAPABILITIES.values())


def test_the_score_head_is_a_capability() -> None:
    assert stage().head == "language_model"
    assert stage(capabilities={"score_head", "packing"}).head == "score"


def test_a_stage_has_a_section_of_its_name() -> None:
    assert stage(sections={"more": OtherSection}).section_name == "spin"
    assert stage(sections={"more": OtherSection}).all_sections == {"spin": OneSection, "more": OtherSection}


def test_two_stages_share_a_section_by_its_name() -> None:
    assert stage(sections={"shared": OneSection}).section_name == "shared"
    assert stage(sections={"shared": OneSection}).all_sections == {"shared": OneSection}


def test_lora_has_the_section_of_sft(registry: Registry) -> None:
    assert registry.stages["lora"].section_name == "sft"
    assert registry.stages["lora"].config_cls is registry.stages["sft"].config_cls
