"""Hunyuan without experts: its config, its description and its published size. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from llmsuite.models.decoder_config import (
    SMALL,
    DenseConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.shape_spec import ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class HunyuanConfig(DenseConfig):
    """Hunyuan without experts. Names are those of HF's config.json."""

    family: ClassVar[str] = "hunyuan"
    architectures: ClassVar[Mapping[str, str]] = {"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "mlp_bias": False,
        "norm_type": "rms",
        "position_embedding_xdrope": False,
        "use_cla": False,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "add_classification_head": False,
    }
    written: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_qk_norm": True}
    # the size of a head by another name; ids of tokens; sizes of what is switched off by `fixed`
    without_effect: ClassVar[tuple[str, ...]] = (
        *("attention_head_dim", "org_vocab_size", "cla_share_factor", "class_num", "dense_list", "pool_type"),
        *("pad_id", "sep_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"),
        *("image_token_id", "mask_init_id"),
    )
    hf_parts: ClassVar[Mapping[str, str]] = {
        "self_attn.q_norm": "self_attn.query_layernorm",
        "self_attn.k_norm": "self_attn.key_layernorm",
    }
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "dynamic")

    model_type: Literal["hunyuan_v1_dense"] = "hunyuan_v1_dense"
    """The only one."""
    vocab_size: PositiveInt = 290943
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: NumLayers = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "dynamic", "alpha"}: a base that is stretched by alpha, whatever the length of a text."""
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    pad_token_id: int | None = 0
    eod_token_id: TokenId | None = 3
    """Kept for config.json."""

    def shape_spec(self) -> ShapeSpec:
        """A Llama with norms of each head of queries and keys, after the rotation."""
        biased = self.attention_bias
        return self.decoder(self.layer(self.grouped_query(normed="rotated", biased=biased, output_biased=biased)))

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads: it needs the size of a head."""
        return {**super().to_hf(), "head_dim": self.head_size}


# huggingface.co/tencent/Hunyuan-7B-Instruct, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "hunyuan-7b": {
        "vocab_size": 128167,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        "tie_word_embeddings": True,
        "bos_token_id": 127958,
        "eos_token_id": 127960,
        "pad_token_id": 127961,
    },
}
"""Shape as published."""

SMOKE: dict[str, Any] = {**SMALL, "head_dim": 16}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
