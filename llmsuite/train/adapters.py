"""The section `lora` of a recipe as a configuration of `paddlenlp.peft`."""

from __future__ import annotations

from typing import Any

from llmsuite.models.paddlenlp_peft import lora_config
from llmsuite.schema.recipe import LoraSection


def adapter_config(lora: LoraSection) -> Any:
    """The `paddlenlp.peft.LoRAConfig` that a section with a rank stands for."""
    assert lora.rank is not None
    return lora_config(r=lora.rank, lora_alpha=lora.alpha, rslora=lora.rslora, lora_plus_scale=lora.lora_plus_ratio)
