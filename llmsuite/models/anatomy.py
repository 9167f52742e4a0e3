"""Sizes of the parts of a decoder: `llmsuite plan` derives from them what each layer computes, keeps and sends.

A family's `anatomy.py` gives them for a shape, beside `layers.py`, which has the code. Imports no Paddle.
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
    """Whether queries and keys are normed, each head by itself."""
    biased: bool = False
    """Whether queries, keys and values have biases."""
    output_biased: bool = False
    """Whether the output has a bias."""
    window: int | None = None
    """How many tokens a token sees at most; None for all before it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of DeepSeek's multi-head latent attention."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    """Part of a query and key head without rotary positions."""
    rope: int
    """Part with rotary positions."""
    value: int
    """Size of a value head."""

    @property
    def width(self) -> int:
        """Size that attention takes queries, keys and values with: zeros fill up what is smaller."""
        return max(self.nope + self.rope, self.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """Size of `blocks.GatedMLP`."""

    width: int
    biased: bool = False
    """Whether its matrices have biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeluMLP:
    """Size of an MLP of two matrices with biases and a GELU between them."""

    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """Sizes of routed experts, and of shared ones as one gated MLP."""

    experts: int
    chosen: int
    """Routed experts each token goes to."""
    width: int
    """Width of a routed expert."""
    shared_width: int
    """Width of all shared experts together; 0 for none."""
    shared_gated: bool = False
    """Whether the shared experts have a gate of their own."""
    normed: bool = False
    """Whether the weights of a token's experts are normalized to add up to 1."""
    clipped: bool = False
    """Whether the sum they are divided by is clipped."""


ATTENTION_MODULES = ("input_layernorm", "self_attn")
"""Modules of the first half of a layer with experts, up to the residual after attention: the half that `to_static`
compiles. Which expert a token goes to depends on values, so the second half cannot be compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAnatomy:
    """A pre-norm decoder layer: two norms, attention, MLP, two residuals."""

    attention: GroupedQuery | Latent
    mlp: GatedMLP | GeluMLP | MoE
    norm: Literal["rms", "layer"] = "rms"
    predicts_further: bool = False
    """Whether it is `moe.MTPLayer`: it takes the embedding of the next token too, and its output is normed."""

    def compiles(self, parameter: str) -> bool:
        """Whether `to_static` compiles the module of a parameter of this layer, given by its full name."""
        return not isinstance(self.mlp, MoE) or any(f".{module}." in parameter for module in ATTENTION_MODULES)

    @property
    def is_plain(self) -> bool:
        """See `Anatomy.is_plain`."""
        attention, mlp = self.attention, self.mlp
        has_plain_mlp = isinstance(mlp, GatedMLP) and not mlp.biased
        has_plain_attention = isinstance(attention, GroupedQuery) and attention.rotary and not attention.output_biased
        return self.norm == "rms" and has_plain_attention and has_plain_mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Sizes of a whole decoder."""

    hidden: int
    vocabulary: int
    layers: Sequence[LayerAnatomy]
    norm: Literal["rms", "layer"] = "rms"
    learned_positions: bool = False
    """Whether positions are embedded, not rotated."""

    @property
    def is_plain(self) -> bool:
        """Whether its layers are those of `models.blocks`, and no more than queries, keys and values have biases: such
        a decoder one kernel takes a token through (`inference.next_logits.uncovered`)."""
        return self.norm == "rms" and not self.learned_positions and all(layer.is_plain for layer in self.layers)
