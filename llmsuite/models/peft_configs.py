"""The configurations of adapters: `paddlenlp.peft.LoRAConfig`; importing this module takes paddlenlp."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from llmsuite.models.paddlenlp_peft import import_alone

LoRAConfig: Any = import_alone("paddlenlp.peft.lora.lora_config")[0].LoRAConfig


@dataclasses.dataclass
class DoraConfig(LoRAConfig):
    """That of DoRA, which paddlenlp does not have; the key is that of HF PEFT."""

    use_dora: bool = True


@dataclasses.dataclass
class VeraConfig(LoRAConfig):
    """That of VeRA, with the fields of LoRA. paddlenlp's `VeRAConfig` has no rank stabilisation."""

    use_vera: bool = True


@dataclasses.dataclass
class LokrConfig(LoRAConfig):
    """That of LoKr, with the fields of LoRA. paddlenlp's `LoKrConfig` names them otherwise."""

    use_lokr: bool = True


def scale_of(config: Any) -> float:
    """The factor of the outputs of adapters: alpha / R, or alpha / sqrt(R) with rank stabilisation. `scaling` of a
    `LoRAConfig` is 1 with PiSSA, as its layers take the beginning off W."""
    return float(config.lora_alpha / (math.sqrt(config.r) if config.rslora else config.r))


def lora_config(method: str = "lora", init: str = "default", **keys: Any) -> Any:
    """The configuration of a kind of adapters.

    Args:
        method: as of `lora.method`.
        init: as of `lora.init`.
        keys: fields of `LoRAConfig`.
    """
    if method == "dora":
        return DoraConfig(**keys)
    if method == "lokr":
        return LokrConfig(**keys)
    if method == "vera":
        return VeraConfig(**keys)
    kinds = {"lora_use_mixer": method == "mixer", "use_mora": method == "mora"}
    return LoRAConfig(**kinds, pissa=init == "pissa", loraga=init == "lora_ga", **keys)
