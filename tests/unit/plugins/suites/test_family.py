"""Families and presets by the names of published models."""

from __future__ import annotations

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.conversion.family import preset_of


@pytest.mark.parametrize(
    ("name", "family", "preset"),
    [
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo", "olmo-2-7b"),
        ("allenai/OLMo-2-0425-1B", "olmo", "olmo-2-1b"),
        ("Qwen/Qwen3-8B", "qwen", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen", "qwen3-4b-2507"),
        ("Qwen/Qwen3-9B", "qwen", None),
    ],
)
def test_presets_by_the_name_of_a_model(registry: Registry, name: str, family: str, preset: str | None) -> None:
    assert preset_of(name, registry.models[family]) == preset
