"""Weights of a decoder in the layout of the kernels for generation."""

from __future__ import annotations

import dataclasses

from llmsuite.base.typing import Tensor


@dataclasses.dataclass(frozen=True)
class Codes:
    """Number format of a packed weight."""

    bits: int
    """32: float32; 16: bf16; 8: integer multiples of a block's scale; 4: codes of 16 levels, times the block's
    scale."""
    levels: tuple[float, ...] = ()
    """The 16 values of the 4-bit codes before scaling, exact in bfloat16."""


FLOATS = Codes(32)


@dataclasses.dataclass(frozen=True)
class DecoderWeights:
    """All parameters of a decoder with grouped-query attention and gated MLPs, in the layout of
    `llmsuite.inference.fused`."""

    layers: list[Tensor]
    """For each layer: first norm [D]; queries, keys and values [D, (H + 2 J) K], and with `has_bias` their bias; with
    `has_head_norms` the norms of a query and of a key [K]; output [H K, D], second norm [D], gate and up [D, 2 F], down
    [F, D]. Packed weights are given by their bytes."""
    norm: Tensor
    """The last norm, [D]."""
    head: Tensor
    """[V, D] with `is_tied`, else [D, V]; packed, the bytes of [D, V]."""
    eps: float
    """Epsilon of every norm."""
    num_queries: int
    """Query heads."""
    intermediate_size: int
    """F."""
    vocab_size: int
    """V."""
    codes: Codes
    """Format of the matrices of all layers."""
    head_codes: Codes
    has_bias: bool
    has_head_norms: bool
    is_tied: bool
