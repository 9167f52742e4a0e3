"""Qwen3-Next, and Qwen3.5 for text with experts: their config, their description and published sizes. Imports no
Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from llmsuite.models.decoder_config import NonNegativeInt, NumLayers, PositiveInt, TokenId, in_written_order
from llmsuite.models.families.qwen_hybrid import HYBRID_SMALL, QwenHybridShape
from llmsuite.models.families.qwen_moe import sparse_step_problems
from llmsuite.models.shape_spec import MoE, ShapeSpec

_OF_QWEN3_5: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
"""Fields that HF's config of qwen3_5_moe_text does not have, with the values that it means."""


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenHybridMoeConfig(QwenHybridShape):
    """Qwen3-Next, and text models of Qwen3.5 with experts. Names are those of HF's config.json."""

    family: ClassVar[str] = "qwen_hybrid_moe"
    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    experts_key: ClassVar[str] = "num_experts"
    chosen_key: ClassVar[str] = "num_experts_per_tok"
    shared_key: ClassVar[str] = "shared_expert_intermediate_size"
    architectures: ClassVar[Mapping[str, str]] = {
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }

    model_type: Literal["qwen3_next", "qwen3_5_moe_text"] = "qwen3_next"
    """qwen3_next: the first matrices of linear attention are joined by heads. qwen3_5_moe_text: they are not, and all
    layers have experts, whose weights add up to 1."""
    vocab_size: PositiveInt = 151936
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 5632
    """Width of the MLP of layers without experts."""
    moe_intermediate_size: PositiveInt = 512
    """Width of an expert."""
    shared_expert_intermediate_size: PositiveInt = 512
    """Width of the shared expert."""
    num_hidden_layers: NumLayers = 48
    decoder_sparse_step: PositiveInt = 1
    """Layers whose number, counted from 1, is a multiple of this have experts."""
    mlp_only_layers: list[NonNegativeInt] = dataclasses.field(default_factory=list)
    """Layers, counted from 0, that have no experts, whatever decoder_sparse_step is."""
    num_experts: PositiveInt = 512
    """Experts a token can be sent to."""
    num_experts_per_tok: PositiveInt = 10
    """Experts of a token."""
    norm_topk_prob: bool = True
    """True where the weights of the chosen experts are made to add up to 1."""
    max_position_embeddings: PositiveInt = 32768
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None

    has_gate_bias: ClassVar[bool] = False
    """True where experts are chosen with a bias."""

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def shape_spec(self) -> ShapeSpec:
        """Layers with linear and with full attention, experts with a shared one that has a gate, and gains of
        1 + weight."""
        mixture = MoE(
            experts=self.num_experts,
            chosen=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=self.shared_expert_intermediate_size,
            shared_gated=True,
            normed=self.norm_topk_prob,
        )
        layers = [
            self.layer(attention, mixture if self.has_experts(i) else None, norm="offset_rms")
            for i, attention in enumerate(self.attentions())
        ]
        return self.decoder(layers, norm="offset_rms")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from sparse_step_problems(self)
        if self.model_type == "qwen3_5_moe_text":
            for key, only in _OF_QWEN3_5.items():
                if getattr(self, key) != only:
                    yield key, f"is {getattr(self, key)}; with qwen3_5_moe_text it is {only}, leave it out"
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json."""
        return super().from_hf({**data, "mlp_only_layers": data.get("mlp_only_layers") or []})

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        data = super().to_hf()
        if self.model_type == "qwen3_5_moe_text":
            return {key: value for key, value in data.items() if key not in _OF_QWEN3_5}
        return data


PRESETS: dict[str, dict[str, Any]] = {
    # huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json
    "qwen3-next-80b-a3b": {
        "intermediate_size": 5120,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **HYBRID_SMALL,
    "model_type": "qwen3_next",
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
"""Small enough for a laptop, with layers of either kind; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("model_type", "norm_topk_prob", "tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
