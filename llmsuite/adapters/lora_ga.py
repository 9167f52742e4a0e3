"""LoRA-GA: LoRA that starts from singular vectors of the gradient of W (Wang et al. 2024, arXiv 2407.05000)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmsuite.adapters.pissa import Pissa
from llmsuite.base.typing import ReadSlice
from llmsuite.models.adapter_method import AdaptedModel, AdapterLayers, zeros

if TYPE_CHECKING:
    import numpy as np


class LoraGa(Pissa):
    """PiSSA's layer with other factors, which `llmsuite.engine.lora_ga` computes before the first step."""

    name = "lora_ga"
    help = "singular vectors of the gradient of W, with the initial A B subtracted from W"
    on_experts = "the gradient of an expert with few tokens has too few singular vectors"
    on_embedding = "the gradient of an embedding has rows only for the tokens of the first batches"
    needs_gradients = True

    def layers(self) -> AdapterLayers:
        from llmsuite.adapters.layers.pissa import LoraGaLinear

        return AdapterLayers(LoraGaLinear)

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """Zeros, until the gradients of W are there."""

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            return zeros(index)

        return initial
