"""The methods of adapters that come with llmsuite. Importing this module adds them to `METHODS`. Imports no Paddle."""

from __future__ import annotations

from llmsuite.adapters.dora import Dora
from llmsuite.adapters.lora import LORA
from llmsuite.adapters.lora_ga import LoraGa
from llmsuite.adapters.olora import Olora
from llmsuite.adapters.pissa import Pissa
from llmsuite.models.adapter_method import METHODS, AdapterConfig, AdapterMethod, find_method

__all__ = ["BUILT_IN", "METHODS", "adapter_config", "find_method", "own_files"]

BUILT_IN: tuple[AdapterMethod, ...] = (LORA, Dora(), Pissa(), Olora(), LoraGa())
METHODS.update({method.name: method for method in BUILT_IN})


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
