"""Qwen3.5 for text, without experts: its config and its description. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from llmsuite.models.decoder_config import (
    SMALL,
    NumLayers,
    PartlyRotatedConfig,
    PositiveInt,
    RotaryPart,
    TokenId,
    in_written_order,
)
from llmsuite.models.shape_spec import GatedDelta, GroupedQuery, ShapeSpec

HybridLayerType = Literal["linear_attention", "full_attention"]
"""The attention of a layer, in HF's `layer_types`."""

_JOINED = {"in_qkvz_proj": "in_proj_qkvz", "in_ba_proj": "in_proj_ba"}
_APART = {
    **dict.fromkeys(("in_q_proj", "in_k_proj", "in_v_proj"), "in_proj_qkv"),
    **{f"in_{part}_proj": f"in_proj_{part}" for part in "zba"},
}
_CONVOLUTIONS = dict.fromkeys(("q_conv", "k_conv", "v_conv"), "conv1d")
_SAME = ("A_log", "dt_bias", "norm", "out_proj")
_LINEAR_PARTS = {**_JOINED, **_APART, **_CONVOLUTIONS, **{part: part for part in _SAME}}


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenHybridShape(PartlyRotatedConfig):
    """Fields that Qwen models with linear attention share, with and without experts. Names are those of HF's
    config.json."""

    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    }
    without_effect: ClassVar[tuple[str, ...]] = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    hf_parts: ClassVar[Mapping[str, str]] = {
        f"self_attn.{ours}": f"linear_attn.{theirs}" for ours, theirs in _LINEAR_PARTS.items()
    }
    hf_reversed: ClassVar[frozenset[str]] = frozenset(f"self_attn.{ours}" for ours in _CONVOLUTIONS)
    not_loaded: ClassVar[tuple[str, ...]] = ("mtp.",)
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "yarn")

    model_type: str
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt | None = 256
    """Size of a head; null for hidden_size / num_attention_heads."""
    layer_types: list[HybridLayerType] | None = None
    """The attention of each layer; null for full attention in every layer of the number full_attention_interval."""
    full_attention_interval: PositiveInt = 4
    """Every layer of this number has full attention, the others linear attention."""
    linear_num_key_heads: PositiveInt = 16
    """Heads of queries and keys of linear attention."""
    linear_num_value_heads: PositiveInt = 32
    """Heads of values of linear attention: a multiple of those of keys."""
    linear_key_head_dim: PositiveInt = 128
    """Size of a head of queries and keys of linear attention."""
    linear_value_head_dim: PositiveInt = 128
    """Size of a head of values of linear attention."""
    linear_conv_kernel_dim: PositiveInt = 4
    """Tokens that the short convolution of linear attention reads, with the token itself."""
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    partial_rotary_factor: RotaryPart = 0.25
    """Part of a head of full attention that is rotated: its first elements."""
    attention_bias: bool = False
    """True where full attention has biases."""
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None

    def attention_types(self) -> list[HybridLayerType]:
        """The attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        interval = self.full_attention_interval
        return [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(self.num_hidden_layers)
        ]

    def attentions(self) -> list[GroupedQuery | GatedDelta]:
        """The attention of each layer, with its sizes: full attention has gates of its output."""
        full = self.grouped_query(
            normed="heads", gated=True, biased=self.attention_bias, output_biased=self.attention_bias
        )
        linear = GatedDelta(
            key_heads=self.linear_num_key_heads,
            heads=self.linear_num_value_heads,
            key_size=self.linear_key_head_dim,
            head_size=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
            joined=self.model_type == "qwen3_next",
        )
        return [full if kind == "full_attention" else linear for kind in self.attention_types()]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        layers = self.num_hidden_layers
        if self.layer_types is not None and len(self.layer_types) != layers:
            yield "layer_types", f"has {len(self.layer_types)} layers; num_hidden_layers is {layers}"
        key = "full_attention_interval" if self.layer_types is None else "layer_types"
        if "full_attention" not in self.attention_types():
            yield key, f"is {getattr(self, key)}: none of the {layers} layers has full attention; one is needed"
        keys = self.linear_num_key_heads
        values = self.linear_num_value_heads
        if values % keys:
            yield "linear_num_key_heads", f"is {keys}, which does not divide linear_num_value_heads = {values}"
        if self.linear_conv_kernel_dim < 2:
            yield "linear_conv_kernel_dim", f"is {self.linear_conv_kernel_dim}; a convolution of 2 or more is needed"
        yield from super().problems()

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        return {**super().to_hf(), "layer_types": self.attention_types()}


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenHybridConfig(QwenHybridShape):
    """Text models of Qwen3.5 without experts. Names are those of HF's config.json."""

    family: ClassVar[str] = "qwen_hybrid"
    architectures: ClassVar[Mapping[str, str]] = {"qwen3_5_text": "Qwen3_5ForCausalLM"}

    model_type: Literal["qwen3_5_text"] = "qwen3_5_text"
    """The only one."""
    vocab_size: PositiveInt = 248320
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 12288
    num_hidden_layers: NumLayers = 32
    num_key_value_heads: PositiveInt = 4
    max_position_embeddings: PositiveInt = 32768

    def shape_spec(self) -> ShapeSpec:
        """Layers with linear and with full attention, and gains of 1 + weight."""
        layers = [self.layer(attention, norm="offset_rms") for attention in self.attentions()]
        return self.decoder(layers, norm="offset_rms")


PRESETS: dict[str, dict[str, Any]] = {}
"""There are none: the published checkpoints are models of images and text."""

HYBRID_SMALL: dict[str, Any] = {
    **SMALL,
    # outputs of linear attention are near zero at random weights: their norm would amplify rounding
    "rms_norm_eps": 1e-2,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
}
"""`SMALL` with layers of either kind."""

SMOKE: dict[str, Any] = {**HYBRID_SMALL}
"""Small enough for a laptop, with layers of either kind; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("model_type", "tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
