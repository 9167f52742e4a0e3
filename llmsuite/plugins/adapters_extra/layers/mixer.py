"""The layers of LoRA with a mixer M [R, R] between the factors (MoSLoRA, Wu et al. 2024, arXiv 2406.11909, eq. 5)."""

from __future__ import annotations

from typing import Any

from paddle import nn

from llmsuite.adapters.layers.lora import LoraEmbedding, LoraExperts, LoraLinear
from llmsuite.base.typing import Tensor
from llmsuite.contract.hookspecs import AdapterConfig
from llmsuite.models.experts import Counts, Local


class MixerLinear(LoraLinear):
    """x W + scale (x A) M B."""

    lora_AB: Any

    def __init__(self, linear: nn.Linear, config: AdapterConfig):
        super().__init__(linear, config, lora_use_mixer=True)  # paddlenlp's layer creates M

    def between_factors(self, low_rank: Tensor) -> Tensor:
        return self.matmul(low_rank, self.lora_AB)


class MixerExperts(LoraExperts):
    """x W + scale (x A) M B for each expert, with a stack of mixers M [E, R, R]."""

    lora_AB: Any

    def between_factors(self, low_rank: Tensor, counts: Counts, local: Local) -> Tensor:
        return self.grouped(low_rank, local(self.lora_AB), counts)


class MixerEmbedding(LoraEmbedding):
    """W[id] + scale A[id] M B."""

    lora_AB: Any

    def between_factors(self, low_rank: Tensor) -> Tensor:
        return self.matmul(low_rank, self.lora_AB)
