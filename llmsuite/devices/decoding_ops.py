"""Operations of generation alone: kernels without gradients, and those that read packed weights.

Shapes: B batch, L new tokens of each row, S columns of the cache, H query heads, J key-value heads, K head size,
D hidden, F intermediate, V vocabulary, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices.decoder_weights import DecoderWeights, PackedWeight


def joined_swiglu(both: Tensor) -> Tensor:
    """`swiglu` of gate and up concatenated, [B, L, 2 F], to [B, L, F]."""
    return F.swiglu(both)


@dataclasses.dataclass(frozen=True)
class DecoderOps:
    """Kernels for the layers of a decoder with a cache in one buffer, whose weights are `DecoderWeights`."""

    next_logits: Callable[[DecoderWeights, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor], int], Tensor]
    """One new token of each row through all layers: embeddings [B, D], cos and sin [B, 1, 1, K / 2], numbers of padding
    columns [B], a cache buffer with free columns, [B, J, S, K] float32 or bfloat16 each, and the number of columns in
    use, to logits [B, V]. It writes keys and values, rounded as by `MatmulOps.round_attention_input`, into the
    cache."""
    cached_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """`Ops.attention` of new tokens [B, L, H, K] to the columns of a cache, [B, J, S, K] each and possibly views, with
    spans [B, 3, L] as of `llmsuite.devices.masks.document_spans`."""


@dataclasses.dataclass(frozen=True)
class PackedOps:
    """Operations on packed weights: matrices in 16, 8 or 4 bits, in the bytes that the kernels read."""

    packed_matmul: Callable[[Tensor, PackedWeight], Tensor]
    """x [..., I], rounded to bfloat16, times a packed weight, [..., O] in float32."""
    packed_grouped_matmul: Callable[[Tensor, PackedWeight, Tensor], Tensor]
    """Grouped product of rows [N, I], rounded to bfloat16, with a packed stack, [N, O] in float32; counts [E] are the
    numbers of rows of each matrix. Trailing rows give zeros."""
    packed_embedding: Callable[[Tensor, PackedWeight], Tensor]
    """Columns of a packed weight by output index [...], [..., I] in float32: embeddings of tokens."""
    write_packed: Callable[[Tensor, PackedWeight, int, bool], None]
    """Writes values [I, n], or transposed [n, I], into a packed weight in bf16, from an output index on."""


@dataclasses.dataclass(frozen=True)
class DecodingOps:
    """The operations of generation that training does not have."""

    joined_swiglu: Callable[[Tensor], Tensor] = joined_swiglu
    """A kernel has no gradient."""
    decoder: DecoderOps | None = None
    """None: a decoder is computed layer by layer."""
    packed: PackedOps | None = None
    """None: the device has no packed weights."""
    heads_first: bool = False
    """True where `Ops.attention` and the cache have keys and values as [B, J, S, K], as models that generate have:
    transposing the full cache in every pass would take longer than all else. See
    `llmsuite.inference.attention.with_cached_attention`."""
