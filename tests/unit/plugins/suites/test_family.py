"""Families and presets by the names of published models."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.conversion.family import family_of, preset_of


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("agentica-org/DeepCoder-14B-Preview", "qwen"),
        ("deepcogito/cogito-v1-preview-qwen-14B", "qwen"),
        ("deepcogito/cogito-v1-preview-llama-3B", "llama"),
        ("01-ai/Yi-34B-Chat", "llama"),
        ("katanemo/Plano-Orchestrator-4B", "qwen"),
        ("katanemo/Plano-Orchestrator-30B-A3B", "qwen_moe"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi"),
        ("microsoft/Phi-3.5-mini-instruct", "phi"),
        ("microsoft/phi-4", "phi"),
        ("Qwen/Qwen3-TTS-12Hz-1.7B-Base", None),
        ("Qwen/Qwen3-ASR-1.7B", None),
        ("microsoft/Phi-4-multimodal-instruct", None),
        ("microsoft/Phi-3.5-MoE-instruct", None),
        ("microsoft/Phi-3-small-8k-instruct", None),
    ],
)
def test_families_by_the_name_of_a_model(registry: Registry, name: str, family: str | None) -> None:
    """None for one that no family supports."""
    if family is not None:
        assert family_of(name, registry).name == family
        return
    with pytest.raises(UserError, match="which no family supports"):
        family_of(name, registry)


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
