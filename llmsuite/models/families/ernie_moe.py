"""ERNIE-4.5 with experts: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from llmsuite.models.decoder_config import (
    SMALL,
    NonNegativeInt,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    in_written_order,
)
from llmsuite.models.families.ernie import ErnieShape
from llmsuite.models.shape_spec import MoE, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class ErnieMoeConfig(ErnieShape):
    """ERNIE-4.5 with experts, for text. Names are those of HF's config.json."""

    family: ClassVar[str] = "ernie_moe"
    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    experts_key: ClassVar[str] = "moe_num_experts"
    chosen_key: ClassVar[str] = "moe_k"
    shared_key: ClassVar[str] = "moe_num_shared_experts x moe_intermediate_size"
    hf_parts: ClassVar[Mapping[str, str]] = {
        "mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"
    }
    not_loaded: ClassVar[tuple[str, ...]] = ("model.mtp_",)
    architectures: ClassVar[Mapping[str, str]] = {"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {
        **ErnieShape.fixed,
        "use_bias": False,
        "moe_gate_act": "softmax",
        "moe_norm_gate_logits": True,
        "moe_group_experts": False,
    }
    # settings of a capacity or of losses that do not exist here; MTP layers, which are not loaded
    without_effect: ClassVar[tuple[str, ...]] = (
        *ErnieShape.without_effect,
        *("moe_capacity", "moe_gate", "moe_use_aux_free", "moe_aux_loss_lambda", "moe_orthogonal_loss_lambda"),
        *("moe_z_loss_lambda", "moe_all_to_all_dropout", "moe_group", "moe_dropout_prob", "num_nextn_predict_layers"),
    )

    model_type: Literal["ernie4_5_moe"] = "ernie4_5_moe"
    """The only one."""
    hidden_size: PositiveInt = 2560
    intermediate_size: PositiveInt = 12288
    """Width of the MLP of layers without experts."""
    moe_intermediate_size: PositiveInt = 1536
    """Width of an expert."""
    num_hidden_layers: NumLayers = 28
    moe_layer_start_index: NonNegativeInt = 1
    """The first layer, counted from 0, that can have experts."""
    moe_layer_end_index: Annotated[int, Ge(-1), Le(1 << 30)] = -1
    """The last one; -1 for the last layer of all."""
    moe_layer_interval: PositiveInt = 1
    """Layers in this range have experts if their number, counted from 1, is a multiple of this."""
    moe_num_experts: PositiveInt = 64
    """Experts a token can be sent to."""
    moe_num_shared_experts: NonNegativeInt = 2
    """Experts every token goes through, computed as one MLP."""
    moe_k: PositiveInt = 6
    """Routed experts of a token."""
    moe_norm_min: PositiveFloat = 1e-12
    """The weights of a token's experts are divided by their sum, or by this if it is larger."""
    num_attention_heads: PositiveInt = 20
    num_key_value_heads: PositiveInt = 4

    has_gate_bias: ClassVar[bool] = True
    """True where experts are chosen with a bias."""

    @property
    def shared_size(self) -> int:
        """Width of the MLP that is the shared experts; 0 for none."""
        return self.moe_num_shared_experts * self.moe_intermediate_size

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, has experts."""
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        return self.moe_layer_start_index <= layer <= last and (layer + 1) % self.moe_layer_interval == 0

    def shape_spec(self) -> ShapeSpec:
        """An ERNIE some of whose layers have experts, which are chosen with a bias."""
        attention = self.grouped_query(interleaved=True)
        mixture = MoE(
            experts=self.moe_num_experts,
            chosen=self.moe_k,
            width=self.moe_intermediate_size,
            shared_width=self.shared_size,
            normed=True,
            least_total=self.moe_norm_min,
            choice_biased=True,
            bias_is_row=True,
        )
        return self.decoder(self.some_with_experts(attention, mixture))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        if not any(self.has_experts(layer) for layer in range(self.num_hidden_layers)):
            yield (
                "moe_layer_start_index",
                f"is {self.moe_layer_start_index}, with moe_layer_end_index {self.moe_layer_end_index} and "
                f"moe_layer_interval {self.moe_layer_interval}: no layer has experts; the ernie family has none",
            )
        yield from super().problems()


PRESETS: dict[str, dict[str, Any]] = {
    # huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT, config.json
    "ernie-4.5-21b-a3b": {},
    # huggingface.co/baidu/ERNIE-4.5-300B-A47B-PT, config.json; github.com/PaddlePaddle/ERNIE,
    # examples/pre-training/model_configs/ERNIE-4p5-300B-A47B/model_config.json
    "ernie-4.5-300b-a47b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "moe_intermediate_size": 3584,
        "num_hidden_layers": 54,
        "moe_layer_start_index": 3,
        "moe_num_shared_experts": 0,
        "moe_k": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "moe_intermediate_size": 32,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 1,
    "moe_k": 2,
    "tie_word_embeddings": True,
}
"""Small enough for a laptop, with a layer of either kind; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("tie_word_embeddings",)
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
