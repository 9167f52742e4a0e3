"""Optional parts of families are found in configs and names that have them, and in no others."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, ClassVar

import pytest

from llmsuite.checkpoint.fused import Heads
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
from llmsuite.recipe.rules.strategy import _too_long


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image(PlainShape):
    model_type: ClassVar[str] = "image"
    width: int = 8


CONFIGS = {
    HasWindow: {"llama", "cohere", "gemma", "gpt_oss", "ministral", "mixtral", "olmo", "phi", "starcoder"},
    HasMtpLayers: {"deepseek", "glm_moe"},
    HasGateBias: {
        *("deepseek", "ernie_moe", "glm_moe", "gpt_oss", "granite_moe", "minimax", "mixtral"),
        *("qwen_hybrid_moe", "qwen_moe"),
    },
}
NAMES = {
    HasPaddleNLPNames: {"gpt"},
    CarriesTensors: {"deepseek", "glm_moe"},
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unlimited(PlainShape):
    """A config that has the fields of another kind of model, and says None in them."""

    model_type: ClassVar[str] = "unlimited"
    max_position_embeddings: int | None = None
    num_attention_heads: int | None = None


def test_none_in_a_field_is_no_number() -> None:
    context: Any = types.SimpleNamespace(
        config=Unlimited(), recipe=types.SimpleNamespace(data=types.SimpleNamespace(max_length=8))
    )
    assert [*_too_long(context)] == []
    assert Heads.of(Unlimited()) is None
