"""The forms in which kernels for generation take the weights of a decoder."""

from __future__ import annotations

import dataclasses

from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class Codes:
    """How the numbers of a stored matrix are written."""

    bits: int
    """32: float32, as it is; 16: bf16; 8: steps of a block's scale; 4: levels of it."""
    levels: tuple[float, ...] = ()
    """The value of each of 16 codes of 4 bits, before it is scaled, exact in bfloat16."""


FLOATS = Codes(32)


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix [I, O], or a stack of them, in the bytes that a device multiplies with."""

    bytes: Tensor
    codes: Codes
    num_inputs: int
    num_outputs: int


@dataclasses.dataclass(frozen=True)
class DecoderWeights:
    """All parameters of a decoder with grouped-query attention and gated MLPs, in the form of
    `llmsuite.inference.fused`."""

    layers: list[Tensor]
    """Layer by layer: first norm [D]; queries, keys and values [D, (H + 2 J) K], and with `has_bias` their bias; with
    `has_head_norms` the norms of a query and of a key [K]; output [H K, D], second norm [D], gate and up [D, 2 F], down
    [F, D]. Of stored matrices, their bytes."""
    norm: Tensor
    """The last norm, [D]."""
    head: Tensor
    """[V, D] with `is_tied`, else [D, V]; the bytes of a stored one are of [D, V]."""
    eps: float
    """Epsilon of every norm."""
    num_queries: int
    """Query heads."""
    intermediate_size: int
    """F."""
    vocab_size: int
    """V."""
    codes: Codes
    """Those of the matrices of all layers."""
    head_codes: Codes
    has_bias: bool
    has_head_norms: bool
    is_tied: bool
