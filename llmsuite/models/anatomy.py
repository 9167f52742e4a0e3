"""What a decoder layer is made of, as sizes: from it `llmsuite plan` tells what a layer computes, keeps and sends.

A family's `anatomy.py` says it of its shapes, beside `layers.py`, which computes it. Imports no Paddle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """`blocks.Attention`, or with `rotary` off GPT's."""

    heads: int
    kv_heads: int
    head_size: int
    rotary: bool = True
    normed: bool = False
    """Whether queries and keys are normed, each head by itself."""
    biased: bool = False
    """Whether queries, keys and values have biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """DeepSeek's attention."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    """Part of a query and key head without rotary positions."""
    rope: int
    """Part with rotary positions."""
    value: int
    """Size of a value head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """`blocks.GatedMLP`."""

    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeluMLP:
    """Two matrices with biases and a GELU between them."""

    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoE:
    """Routed experts, and shared ones as one gated MLP."""

    experts: int
    chosen: int
    """Experts of a token."""
    width: int
    """Of a routed expert."""
    shared_width: int
    normed: bool = False
    """Whether the weights of a token's experts are made to add up to 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAnatomy:
    """A pre-norm decoder layer: two norms, attention, MLP, two residuals."""

    attention: GroupedQuery | Latent
    mlp: GatedMLP | GeluMLP | MoE
    norm: Literal["rms", "layer"] = "rms"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A decoder."""

    hidden: int
    vocabulary: int
    layers: Sequence[LayerAnatomy]
    norm: Literal["rms", "layer"] = "rms"
    learned_positions: bool = False
    """Whether positions are embedded, not rotated."""
