"""The methods of adapters, by name: those of llmsuite, and those that plugins have registered. Imports no Paddle."""

from __future__ import annotations

from llmsuite.adapters.dora import Dora
from llmsuite.adapters.lora import LORA
from llmsuite.adapters.lora_ga import LoraGa
from llmsuite.adapters.method import AdapterConfig, AdapterMethod
from llmsuite.adapters.pissa import Pissa

BUILT_IN: tuple[AdapterMethod, ...] = (LORA, Dora(), Pissa(), LoraGa())
METHODS: dict[str, AdapterMethod] = {method.name: method for method in BUILT_IN}
"""Each method by its value of `lora.method`, or of `lora.init`. The registry of plugins adds those of plugins: names of
parameters have to be understood everywhere in a process, also where there is no registry."""


def find_method(method: str = "lora", init: str = "default") -> AdapterMethod:
    """The method of the recipe keys `lora.method` and `lora.init`."""
    return METHODS[method] if init == "default" else METHODS[init]


def own_files() -> dict[str, AdapterMethod]:
    """The methods for which PaddleNLP has files of their own, by the name of the file with their configuration."""
    return {method.paddlenlp.config_name: method for method in METHODS.values() if method.paddlenlp is not None}


def adapter_config(
    method: str = "lora",
    init: str = "default",
    *,
    rank: int,
    alpha: float = 16.0,
    dropout: float = 0.0,
    rslora: bool = False,
    lora_plus_ratio: float = 1.0,
) -> AdapterConfig:
    """The configuration of adapters by the values of the keys of the recipe section `lora`."""
    return AdapterConfig(find_method(method, init), rank, alpha, dropout, rslora, lora_plus_ratio)
