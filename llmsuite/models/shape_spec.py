"""Sizes of the parts of a decoder: `llmsuite plan` derives from them the FLOPs, memory and messages of each layer.

The `shape_spec.py` of a family computes them from a config; its `layers.py` has the code. Imports no Paddle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Sizes of `blocks.Attention`; without `rotary`, of GPT's attention."""

    heads: int
    kv_heads: int
    head_size: int
    rotary: bool = True
    normed: bool = False
    """True where each head of queries and keys is normed."""
    biased: bool = False
    """True where queries, keys and values have biases."""
    output_biased: bool = False
    """True where the output has a bias."""
    window: int | None = None
    """Size of the attention window in tokens; None for full causal attention."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of DeepSeek's multi-head latent attention."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    """Size of the part of a query and key head without rotary positions."""
    rope: int
    """Size of the part with rotary positions."""
    value: int
    """Size of a value head."""

    @property
    def width(self) -> int:
        """Head size of the attention kernel: smaller queries, keys or values are padded with zeros."""
        return max(self.nope + self.rope, self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """Size of `blocks.GatedMLP`."""

    width: int
    biased: bool = False
    """True where its matrices have biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeluMLP:
    """Size of an MLP of two matrices with biases and a GELU between them."""

    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """Sizes of routed experts, and of shared experts, which are one gated MLP."""

    experts: int
    chosen: int
    """Number of routed experts of a token."""
    width: int
    """Width of a routed expert."""
    shared_width: int
    """Total width of all shared experts; 0 for none."""
    shared_gated: bool = False
    """True where the shared experts have a separate gate."""
    normed: bool = False
    """True where the weights of a token's experts are normalized to add up to 1."""
    clipped: bool = False
    """True where the divisor of that normalisation is clipped."""


ATTENTION_MODULES = ("input_layernorm", "self_attn")
"""Modules of the first half of a layer with experts, up to the residual after attention: the half that `to_static`
compiles. The second half cannot be compiled, as its routing depends on values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A pre-norm decoder layer: two norms, attention, MLP, two residuals."""

    attention: GroupedQuery | Latent
    mlp: GatedMLP | GeluMLP | MoE
    norm: Literal["rms", "layer"] = "rms"
    is_mtp: bool = False
    """True where it is a `moe.MTPLayer`: it takes the embedding of the next token too, and its output is normed."""

    @property
    def window(self) -> int | None:
        """Size of its attention window in tokens; None for full causal attention."""
        return self.attention.window if isinstance(self.attention, GroupedQuery) else None

    def compiles(self, parameter: str) -> bool:
        """True if `to_static` compiles the module of this layer that has a parameter with this full name."""
        return not isinstance(self.mlp, MoE) or any(f".{module}." in parameter for module in ATTENTION_MODULES)

    @property
    def is_plain(self) -> bool:
        """True if the layer has no parts that the fused decoding kernel lacks; see `ShapeSpec.is_plain`."""
        attention = self.attention
        mlp = self.mlp
        has_plain_mlp = isinstance(mlp, GatedMLP) and not mlp.biased
        has_plain_attention = isinstance(attention, GroupedQuery) and attention.rotary and not attention.output_biased
        return self.norm == "rms" and has_plain_attention and has_plain_mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeSpec:
    """Sizes of a decoder."""

    hidden: int
    vocabulary: int
    layers: Sequence[LayerSpec]
    norm: Literal["rms", "layer"] = "rms"
    learned_positions: bool = False
    """True where positions are learned embeddings, not rotary."""

    @property
    def is_plain(self) -> bool:
        """True if all layers are those of `models.blocks` with no biases but those of queries, keys and values: one
        fused kernel can decode a token with such a model (`inference.plain_decoder.unsupported_reason`)."""
        return self.norm == "rms" and not self.learned_positions and all(layer.is_plain for layer in self.layers)
