"""Operations of generation alone: kernels without gradients, and those that read packed weights.

Shapes: B batch, L new tokens of each row, S columns of the cache, J key-value heads, K head size, F intermediate,
N rows, E experts, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor


def joined_swiglu(both: Tensor) -> Tensor:
    """`swiglu` of gate and up concatenated, [B, L, 2 F], to [B, L, F]."""
    return F.swiglu(both)


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A matrix [I, O], or a stack of them, packed in the bytes that the device's kernels read."""

    bytes: Tensor
    codes: Any
    """Number format, in the form that the kernels take."""
    num_inputs: int
    num_outputs: int


@dataclasses.dataclass(frozen=True)
class MatrixPart:
    """Outputs of a matrix that come from one parameter."""

    num_outputs: int
    read: Callable[[int, int], np.ndarray]
    """Maps the range of outputs, first and end, to their values, [I, n] float32."""


@dataclasses.dataclass(frozen=True)
class PackedOps:
    """Operations on packed weights: matrices in 16, 8 or 4 bits, in the bytes that the kernels read."""

    pack: Callable[[Sequence[MatrixPart], int, str], PackedWeight]
    """Packs the outputs of several parameters into one matrix. Takes the parts, the number of inputs I, and one of
    `DeviceBackend.weight_only_precisions`. Only a chunk of the values is in memory at a time."""
    pack_stack: Callable[[Sequence[MatrixPart], int, str], PackedWeight]
    """Packs matrices of one shape, such as those of experts, into one stack; arguments as for `pack`."""
    packed_matmul: Callable[[Tensor, PackedWeight], Tensor]
    """x [..., I], rounded to bfloat16, times a packed weight, [..., O] in float32."""
    packed_grouped_matmul: Callable[[Tensor, PackedWeight, Tensor], Tensor]
    """Grouped product of rows [N, I], rounded to bfloat16, with a packed stack, [N, O] in float32; counts [E] are the
    numbers of rows of each matrix. Trailing rows give zeros."""
    packed_embedding: Callable[[Tensor, PackedWeight], Tensor]
    """Columns of a packed weight by output index [...], [..., I] in float32: embeddings of tokens."""
    write_packed: Callable[[Tensor, PackedWeight, int, bool], None]
    """Writes values [I, n], or transposed [n, I], into a packed weight in bf16, from an output index on."""


DecoderBuilder = Callable[[Any, str | None], Any]
"""Takes the device's `Ops` and the dtype of keys and values in the cache (None for the dtype they are computed in).
Called after the layers of the model are fused; returns a `llmsuite.models.blocks.DecodingKernels` with `next_logits`
and `prefill`, or None where the dtype or the layout of a parameter is not supported."""


@dataclasses.dataclass(frozen=True)
class DecodingOps:
    """The operations of generation that training does not have."""

    joined_swiglu: Callable[[Tensor], Tensor] = joined_swiglu
    """A kernel has no gradient."""
    decoder_for: Callable[[Any], DecoderBuilder | None] | None = None
    """Takes a model before its layers are fused, possibly without memory (`llmsuite.models.blocks.CausalLM`). Returns
    the builder of kernels that compute all its layers together, or None for a model that they do not support. None: a
    decoder is computed layer by layer."""
    packed: PackedOps | None = None
    """None: the device has no packed weights."""
    heads_first: bool = False
    """True where `Ops.attention` and the cache have keys and values as [B, J, S, K], as models that generate have:
    transposing the full cache in every pass would take longer than all else. See
    `llmsuite.inference.attention.with_cached_attention`."""
