"""LoRA with a mixer between the factors (MoSLoRA, Wu et al. 2024, arXiv 2406.11909, eq. 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmsuite.adapters.lora import FIRST_FACTOR, LORA, SECOND_FACTOR, Lora
from llmsuite.base.typing import ReadSlice
from llmsuite.contract.hookspecs import AdaptedModel, AdapterConfig, AdapterLayers, AdapterParameter
from llmsuite.models.adapter_method import Array, split

if TYPE_CHECKING:
    import numpy as np

MIXER = "lora_AB"
"""Name of the mixer M [R, R]."""


class Mixer(Lora):
    """W + scale A M B."""

    name = "mixer"
    help = "a trained rank x rank matrix between A and B"
    parameters: Mapping[str, AdapterParameter] = {
        FIRST_FACTOR: Lora.parameters[FIRST_FACTOR],
        MIXER: AdapterParameter(partial_gradient="tokens"),
        SECOND_FACTOR: Lora.parameters[SECOND_FACTOR],
    }
    is_plain = False
    flag = "lora_use_mixer"
    pair_parts: Mapping[str, str] = {"AB": MIXER}

    def layers(self) -> AdapterLayers:
        from llmsuite.plugins.adapters_extra.layers.mixer import MixerEmbedding, MixerExperts, MixerLinear

        return AdapterLayers(MixerLinear, MixerExperts, MixerEmbedding)

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        return {FIRST_FACTOR: (num_inputs, rank), MIXER: (rank, rank), SECOND_FACTOR: (rank, num_outputs)}

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """The values of LoRA; M is random with the variance of A."""
        from llmsuite.models.initial_values import initial_values

        factors = super().initial(model)

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            if split(name)[1] == MIXER:
                return initial_values(model.seed, name, shape, (3 * shape[-2]) ** -0.5, index)
            return factors(name, shape, index)

        return initial

    def product(self, parameters: Mapping[str, Array]) -> Array:
        return (parameters[FIRST_FACTOR] @ parameters[MIXER]) @ parameters[SECOND_FACTOR]

    def kept_width(self, rank: int, num_outputs: float, uses_device_matmul: bool) -> float:
        return 2.0 * rank  # the input of M too

    def folded(self, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """x A M B is x (A M) B."""
        first = parameters[FIRST_FACTOR]
        # multiplied in float32, so that only the result is rounded to the stored dtype
        mixed = (first.astype("float32") @ parameters[MIXER].astype("float32")).astype(first.dtype)
        return {FIRST_FACTOR: mixed, SECOND_FACTOR: parameters[SECOND_FACTOR]}

    def folded_config(self, config: AdapterConfig) -> AdapterConfig:
        return dataclasses.replace(config, method=LORA)
