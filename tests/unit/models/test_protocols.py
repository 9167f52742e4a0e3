"""Optional parts of families are found in configs and names that have them, and in no others."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.models.plain import PlainNames, PlainShape
from llmsuite.models.protocols import (
    CarriesTensors,
    HasGateBias,
    HasGgufNames,
    HasMtpLayers,
    HasPaddleNLPNames,
    HasScoreHead,
    HasShapes,
    HasVocabulary,
    HasWindow,
    num_stored_mtp_layers,
    shape_fields,
    window_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image(PlainShape):
    model_type: ClassVar[str] = "image"
    width: int = 8


CONFIGS = {
    HasWindow: {"llama"},
    HasMtpLayers: {"deepseek"},
    HasGateBias: {"deepseek", "ernie_moe", "qwen_moe"},
}
NAMES = {
    HasPaddleNLPNames: {"gpt"},
    CarriesTensors: {"deepseek"},
    HasGgufNames: {"llama", "qwen"},
}


@pytest.mark.parametrize("protocol", CONFIGS, ids=lambda protocol: protocol.__name__)
def test_configs_have_what_their_family_has(protocol: type, registry: Registry) -> None:
    found = {name for name, family in registry.models.items() if isinstance(family.config_cls(), protocol)}
    assert found == CONFIGS[protocol]


@pytest.mark.parametrize("protocol", NAMES, ids=lambda protocol: protocol.__name__)
def test_names_have_what_their_family_has(protocol: type, registry: Registry) -> None:
    found = {name for name, family in registry.models.items() if isinstance(family.names(), protocol)}
    assert found == NAMES[protocol]


def test_every_family_has_shapes_and_a_vocabulary(registry: Registry) -> None:
    for family in registry.models.values():
        assert isinstance(family.names(), HasShapes)
        assert isinstance(family.config_cls(), HasVocabulary)
        assert isinstance(family.config_cls(), HasScoreHead)


def test_a_plain_model_has_none_of_them() -> None:
    config = Image()
    names = PlainNames(lambda config: [])
    for protocol in (HasVocabulary, HasScoreHead, *CONFIGS):
        assert not isinstance(config, protocol)
    for protocol in (HasShapes, *NAMES):
        assert not isinstance(names, protocol)
    assert window_of(config) is None
    assert num_stored_mtp_layers(config) == 0
    assert shape_fields(config) == {"width": 8}
