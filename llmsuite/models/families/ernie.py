"""ERNIE-4.5 without experts: its config, its description and its published size. Imports no Paddle."""

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
from llmsuite.models.shape_spec import GatedMLP, ShapeSpec

# settings of other programs for training and serving
_WITHOUT_EFFECT = (
    *("use_flash_attention", "use_sparse_flash_attn", "use_recompute", "fuse_rope", "fuse_rms_norm", "fuse_swiglu"),
    *("fuse_linear", "fuse_attn_ffn", "compression_ratio", "ignored_index", "max_sequence_length"),
)


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class ErnieShape(DenseConfig):
    """Fields that ERNIE-4.5 models with and without experts share. Names are those of HF's config.json."""

    family: ClassVar[str] = "ernie"
    architectures: ClassVar[Mapping[str, str]] = {"ernie4_5": "Ernie4_5ForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_rmsnorm": True, "rope_reorder": False}
    without_effect: ClassVar[tuple[str, ...]] = _WITHOUT_EFFECT

    model_type: str
    vocab_size: PositiveInt = 103424
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 500000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "linear", "factor"}."""
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    pad_token_id: int | None = 0

    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear")


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class ErnieConfig(ErnieShape):
    """ERNIE-4.5 without experts. Names are those of HF's config.json."""

    model_type: Literal["ernie4_5"] = "ernie4_5"
    """The only one."""
    hidden_size: PositiveInt = 1024
    intermediate_size: PositiveInt = 3072
    num_hidden_layers: NumLayers = 18
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt | None = 128
    """Size of a head; null for hidden_size / num_attention_heads."""
    use_bias: bool = False
    """True where the matrices of attention and MLP have biases."""

    def shape_spec(self) -> ShapeSpec:
        """A pre-norm decoder whose rotary pairs are neighbours."""
        biased = self.use_bias
        attention = self.grouped_query(interleaved=True, biased=biased, output_biased=biased)
        return self.decoder(self.layer(attention, GatedMLP(width=self.intermediate_size, biased=biased)))


# huggingface.co/baidu/ERNIE-4.5-0.3B-PT, config.json
PRESETS: dict[str, dict[str, Any]] = {"ernie-4.5-0.3b": {}}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("tie_word_embeddings", "use_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
