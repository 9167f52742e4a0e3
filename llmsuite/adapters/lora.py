"""LoRA: a pair of low-rank factors next to a frozen matrix (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmsuite.adapters.shared_first import first_of
from llmsuite.base.typing import ReadSlice
from llmsuite.models.adapter_method import (
    AdaptedModel,
    AdapterLayers,
    AdapterMethod,
    AdapterParameter,
    Array,
    split,
    zeros,
)

if TYPE_CHECKING:
    import numpy as np

FIRST_FACTOR = "lora_A"
SECOND_FACTOR = "lora_B"
"""Names of the factors A [I, R] and B [R, O]."""


class Lora(AdapterMethod):
    """W + scale A B. Subclasses add to the pair."""

    name = "lora"
    help = "two trained factors, A and B"
    parameters: Mapping[str, AdapterParameter] = {
        FIRST_FACTOR: AdapterParameter(by_inputs=0),
        SECOND_FACTOR: AdapterParameter(by_outputs=1, partial_gradient="tokens"),
    }
    on_experts = ""
    on_embedding = ""
    supports_padding = True
    fits_any_rank = True
    is_plain = True
    stores_pair = True
    merges_slices: Sequence[int] = (0, 1)

    def layers(self) -> AdapterLayers:
        from llmsuite.adapters.layers.lora import LoraEmbedding, LoraExperts, LoraLinear

        return AdapterLayers(LoraLinear, LoraExperts, LoraEmbedding)

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        return {FIRST_FACTOR: (num_inputs, rank), SECOND_FACTOR: (rank, num_outputs)}

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """B is zero. A has the variance of PyTorch's default for a matrix of I inputs, 1 / (3 I), as in HF PEFT and
        PaddleNLP. For an embedding A is zero and B standard normal, as in HF PEFT."""
        from llmsuite.models.initial_values import initial_values

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            module, kind = split(name)
            if module == model.embedding:
                if kind == SECOND_FACTOR:
                    return initial_values(model.seed, name, shape, 1.0, index)
                return zeros(index)
            if kind == FIRST_FACTOR:
                source = f"{first_of(module)}.{kind}" if model.config.share_first else name
                num_parts = model.config.init_shards if model.is_cut_by_inputs(module) else 1
                return initial_values(model.seed, source, shape, (3 * shape[-2] / num_parts) ** -0.5, index)
            return zeros(index)

        return initial

    def merged(self, weight: Array, parameters: Mapping[str, Array], scale: float) -> Array:
        return weight + self.product(parameters) * scale

    def product(self, parameters: Mapping[str, Array]) -> Array:
        """The update of W without its scale, [I, O]."""
        return parameters[FIRST_FACTOR] @ parameters[SECOND_FACTOR]


LORA = Lora()
