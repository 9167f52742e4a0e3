"""Qwen with experts: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from llmsuite.base.errors import UserError
from llmsuite.models.decoder_config import SMALL, NonNegativeInt, NumLayers, PositiveInt, in_written_order
from llmsuite.models.families.qwen import QwenShape
from llmsuite.models.shape_spec import MoE, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenMoeConfig(QwenShape):
    """Qwen2-MoE and Qwen3-MoE. Names are those of HF's config.json."""

    family: ClassVar[str] = "qwen_moe"
    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    experts_key: ClassVar[str] = "num_experts"
    chosen_key: ClassVar[str] = "num_experts_per_tok"
    shared_key: ClassVar[str] = "shared_expert_intermediate_size"

    model_type: Literal["qwen2_moe", "qwen3_moe"] = "qwen3_moe"
    """qwen2_moe: biases on q, k and v, and a shared expert with a gate of its own. qwen3_moe: a norm on each head of q
    and k, no shared expert."""
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 6144
    """Width of the MLP of layers without experts."""
    moe_intermediate_size: PositiveInt = 768
    """Width of an expert."""
    shared_expert_intermediate_size: PositiveInt = 5632
    """Width of the shared expert of qwen2_moe."""
    num_hidden_layers: NumLayers = 48
    decoder_sparse_step: PositiveInt = 1
    """Layers whose number, counted from 1, is a multiple of this have experts."""
    mlp_only_layers: list[NonNegativeInt] = dataclasses.field(default_factory=list)
    """Layers, counted from 0, that have no experts, whatever decoder_sparse_step is."""
    num_experts: PositiveInt = 128
    """Experts a token can be sent to."""
    num_experts_per_tok: PositiveInt = 8
    """Experts of a token."""
    norm_topk_prob: bool = True
    """True where the weights of the chosen experts are made to add up to 1."""
    num_key_value_heads: PositiveInt = 4

    has_gate_bias: ClassVar[bool] = False
    """True where experts are chosen with a bias."""

    @property
    def shared_size(self) -> int:
        """Width of the shared expert; 0 for none."""
        return self.shared_expert_intermediate_size if self.has_qkv_bias else 0

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def shape_spec(self) -> ShapeSpec:
        """A Qwen some of whose layers have experts, those of Qwen2 with a shared expert that has a gate of its own."""
        attention = self.grouped_query(biased=self.has_qkv_bias, normed="heads" if self.has_head_norms else None)
        mixture = MoE(
            experts=self.num_experts,
            chosen=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=self.shared_size,
            shared_gated=self.shared_size > 0,
            normed=self.norm_topk_prob,
        )
        return self.decoder(self.some_with_experts(attention, mixture))

    @property
    def paddlenlp_prefix(self) -> str | None:
        """None for Qwen3-MoE, which PaddleNLP does not have."""
        return "qwen2_moe." if self.model_type == "qwen2_moe" else None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from sparse_step_problems(self)
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of a config.json, HF's or PaddleNLP's; raises UserError as `QwenShape.from_hf`."""
        data = {**_OF_HF, **data}
        if "num_local_experts" in data:  # another name, which transformers 5 uses
            data = {"num_experts": data["num_local_experts"], **data}
            del data["num_local_experts"]
        if data.pop("qkv_bias", True) is not True:
            raise UserError("config.json: qkv_bias is not true; qwen2_moe has biases on q, k and v only so")
        return super().from_hf({**data, "mlp_only_layers": data["mlp_only_layers"] or []})

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers and PaddleNLP read."""
        data = super().to_hf()
        if not self.has_qkv_bias:
            del data["shared_expert_intermediate_size"]
            return data
        return {**data, "qkv_bias": True}


def sparse_step_problems(config: Any) -> Iterator[tuple[str, str]]:
    """Rules for the choice of the layers with experts, as (field, message).

    Args:
        config: has family, num_hidden_layers, decoder_sparse_step, mlp_only_layers and has_experts().
    """
    if not any(config.has_experts(layer) for layer in range(config.num_hidden_layers)):
        key = "mlp_only_layers" if config.mlp_only_layers else "decoder_sparse_step"
        without = config.family.removesuffix("_moe")
        yield key, f"is {getattr(config, key)}: no layer has experts; the {without} family has none"


_OF_HF: dict[str, Any] = {"norm_topk_prob": False, "mlp_only_layers": []}
"""HF's defaults of keys that config.json may omit, where they differ from ours."""


def _qwen2_moe(hidden: int, heads: int, kv_heads: int, experts: int, chosen: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": False,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # huggingface.co/Qwen/Qwen1.5-MoE-A2.7B-Chat, config.json
    "qwen1.5-moe-a2.7b": {
        **_qwen2_moe(2048, 16, 16, experts=60, chosen=4),
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 24,
    },
    # huggingface.co/Qwen/Qwen2-57B-A14B-Instruct, config.json
    "qwen2-57b-a14b": {
        **_qwen2_moe(3584, 28, 4, experts=64, chosen=8),
        "intermediate_size": 18944,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_hidden_layers": 28,
    },
    # huggingface.co/Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B, config.json
    "qwen3-30b-a3b": {"head_dim": 128, "max_position_embeddings": 40960},
    "qwen3-235b-a22b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    # huggingface.co/Qwen/Qwen3-30B-A3B-Instruct-2507, Qwen3-235B-A22B-Instruct-2507 and -Thinking-2507, config.json
    "qwen3-30b-a3b-2507": {"head_dim": 128, "max_position_embeddings": 262144, "rope_theta": 10000000.0},
    "qwen3-235b-a22b-2507": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_theta": 5000000.0,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [0],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 16,
}
"""Small enough for a laptop, with a layer of either kind; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("model_type", "norm_topk_prob", "tie_word_embeddings")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
