"""The operations of `llmsuite.devices.ops` by the kernels of this plugin; equal to the plain forms up to rounding.

Each rank computes its local shard of distributed tensors. Inputs that a kernel does not support go to the plain form:
dtypes other than float32, and distributed tensors inside a program of `paddle.jit.to_static`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.devices import decoding_ops, expert_ops, masks, ops, optimizer_ops
from llmsuite.devices.cpp_library import CppLibrary
from llmsuite.devices.decoding_ops import DecoderBuilder, PackedWeight
from llmsuite.devices.local_parts import have_same_layout, is_split, local_constant, on_local_rows, on_local_shards
from llmsuite.devices.matmul_ops import Pairs
from llmsuite.models.blocks import CausalLM
from llmsuite.plugins.cpu_kernels.decoder import DecoderOps
from llmsuite.plugins.cpu_kernels.decoder_weights import DecoderWeights
from llmsuite.plugins.cpu_kernels.libraries import KERNELS, build_kernels
from llmsuite.plugins.cpu_kernels.packing import pack_parts, pack_stack

__all__ = ["pack_parts", "pack_stack"]


@functools.cache  # Paddle loads a library only once
def load(what: CppLibrary = KERNELS) -> bool:
    """Build the kernels if necessary, and register them with Paddle; False if they cannot be built."""
    library = build_kernels(what)
    if library is not None:
        paddle.utils.cpp_extension.load_op_meta_info_and_register_op(str(library))
    return library is not None


def no_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor | None:
    """Mask of a kernel that is causal by default: None, or with a window `spans`, [1, 3, L]."""
    if window is None:
        return None
    assert num_queries == num_keys, "spans need as many queries as keys"
    return masks.document_spans(paddle.zeros([1, num_keys], "int64"), window)


def spans(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`document_mask` in the form of `attention`: `masks.document_spans`, [B, 3, L]."""
    return masks.document_spans(document_starts, window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention that skips the keys that a token does not see. A mask has the form of `spans`, or is added to
    the scores, as in generation."""
    return _attention("attention", q, k, v, mask)


def bf16_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`attention` whose products, and those of its gradients, are of inputs rounded to bfloat16, with float32 sums.
    With bfloat16 inputs the output and the gradients are bfloat16 too."""
    return _attention("bf16_attention", q, k, v, mask)


def _attention(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None and mask.dtype != paddle.int64:
        return ops.attention(q, k, v, mask)
    is_bf16 = q.dtype == paddle.bfloat16
    if not _takes(q, k, v, dtype=paddle.bfloat16 if is_bf16 else paddle.float32):
        plain = masks.causal_mask(q.shape[1], k.shape[1], q.dtype) if mask is None else masks.span_mask(mask, q.dtype)
        return ops.attention(q, k, v, plain)
    if mask is None:
        return _on_local_shards(lambda *local: _run(kernel, *local, _spans(local[0]))[0], q, k, v)
    given = local_constant(mask)
    return _on_local_shards(lambda *local: _run(kernel, *local, given)[0], q, k, v)


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, spans: Tensor, num_keys: int) -> Tensor:
    """`attention` of new tokens to a cache, which is read in place; for generation, without a gradient.

    Args:
        q: [B, L, H, K], the queries of the last L positions.
        keys: [B, J, C, K], with room for more positions.
        values: likewise.
        spans: [B, 3, L], as of `llmsuite.devices.masks.document_spans`.
        num_keys: filled positions of the cache.
    """
    return _cached_attention("cached_attention", q, keys, values, spans, num_keys)


def bf16_cached_attention(q: Tensor, keys: Tensor, values: Tensor, spans: Tensor, num_keys: int) -> Tensor:
    """`cached_attention` with the products of `bf16_attention`."""
    return _cached_attention("bf16_cached_attention", q, keys, values, spans, num_keys)


def _cached_attention(kernel: str, q: Tensor, keys: Tensor, values: Tensor, spans: Tensor, num_keys: int) -> Tensor:
    outputs: list[Tensor] = paddle._C_ops._run_custom_op(
        f"llmsuite_{kernel}", q.contiguous(), keys, values, spans.contiguous(), num_keys
    )
    return outputs[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm` in one pass."""
    if not _takes(x) or x.is_dist() != weight.is_dist():
        return ops.rms_norm(x, weight, eps)
    if not x.is_dist():
        return _run("rms_norm", x, weight, eps)[0]
    return on_local_rows(lambda rows, gain: _run("rms_norm", rows, gain, eps)[0], x, weight)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.rotary` in one pass, computed in float32 also for bfloat16 inputs."""
    if not _takes(x, dtype=paddle.bfloat16 if x.dtype == paddle.bfloat16 else paddle.float32):
        return ops.rotary(x, cos, sin)
    return _on_local_shards(lambda local: _run("rotary", local, local_constant(cos), local_constant(sin))[0], x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`ops.swiglu` in one pass, computed in float32 also for bfloat16 inputs."""
    is_bf16 = gate.dtype == paddle.bfloat16
    if is_bf16 and 0 in gate.shape:  # the plain form does not support bfloat16 on the CPU
        return _run("swiglu", gate, up)[0]
    if not _takes(gate, up, dtype=paddle.bfloat16 if is_bf16 else paddle.float32):
        return ops.swiglu(gate, up)
    return _on_local_shards(lambda *local: _run("swiglu", *local)[0], gate, up)


def joined_swiglu(both: Tensor) -> Tensor:
    """`decoding_ops.joined_swiglu` in one pass; for generation, without a gradient."""
    if not _takes(both):
        return decoding_ops.joined_swiglu(both)
    return _run("joined_swiglu", both, False)[0]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """`ops.cross_entropy` whose gradient overwrites the logits, which nothing else needs."""
    if not _takes(logits) or (logits.is_dist() and paddle.in_dynamic_mode()):
        return ops.cross_entropy(logits, targets)
    return _on_local_shards(lambda local: _run("cross_entropy", local, local_constant(targets))[0], logits)


def bf16_grad_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`cross_entropy` whose gradient is rounded to bfloat16 when it is computed, in the memory of the logits."""
    nll, sums = _run("cross_entropy", logits, targets)
    return nll, lambda given: _run("cross_entropy_back", logits, targets, sums, given)[0]


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`expert_ops.grouped_matmul` by one product per matrix, of only its rows."""
    if not _takes(x, weight):
        return expert_ops.grouped_matmul(x, weight, counts)
    return _grouped("grouped", x, weight, counts)


def dispatch_rows(tokens: Tensor, order: Tensor, inverse_order: Tensor, counts: Tensor) -> Tensor:
    """`expert_ops.dispatch_rows` in one pass forward and one backward; rows without an expert are zeros."""
    if not _takes(tokens):
        return expert_ops.dispatch_rows(tokens, order, inverse_order, counts)
    return _run("dispatch_rows", tokens, order, inverse_order, counts)[0]


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor, inverse_order: Tensor, counts: Tensor) -> Tensor:
    """`expert_ops.combine_rows` in one pass forward and one backward, without a copy of the rows."""
    if not _takes(rows, weights):
        return expert_ops.combine_rows(rows, weights, order, inverse_order, counts)
    return _run("combine_rows", rows, weights, order, inverse_order, counts)[0]


# products of inputs that are rounded to bfloat16, with float32 sums


def bf16_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`MatmulOps.matmul` of inputs that are rounded to bfloat16, if they are not yet, with float32 sums. Only x may
    have more than two dims."""
    return _run("bf16_product", *_sides([(x, y)]), transpose_x, transpose_y, False)[0]


def bf16_sum_matmul(pairs: Pairs, transpose_y: bool) -> Tensor:
    """The sum of the products `bf16_matmul` of several pairs, in one pass."""
    return _run("bf16_product", *_sides(pairs), False, transpose_y, False)[0]


def bf16_rounded_output_matmul(pairs: Pairs, transpose_y: bool) -> Tensor:
    """`bf16_sum_matmul` whose sums are rounded to bfloat16 when they are computed."""
    return _run("bf16_product", *_sides(pairs), False, transpose_y, True)[0]


def round_to_bf16(x: Tensor) -> Tensor:
    """x rounded to bfloat16, half of the memory; x itself if it is bfloat16 already."""
    return x if x.dtype == paddle.bfloat16 else _run("round_bf16", x)[0]


def round_to_bf16_in_float32(x: Tensor) -> Tensor:
    """x rounded to bfloat16, as float32."""
    return _run("rounded", x)[0]


def rounded_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`bf16_matmul` for processors without fast bfloat16 instructions: a float32 product of rounded inputs, by MKL."""
    x, y = (_run("rounded", t)[0] for t in (x, y))
    return paddle.matmul(x, y, transpose_x, transpose_y)


def rounded_io_matmul(pairs: Pairs, transpose_y: bool) -> Tensor:
    """`bf16_rounded_output_matmul` by float32 products of rounded inputs, as `rounded_matmul`."""
    first, *rest = (rounded_matmul(x, y, False, transpose_y) for x, y in pairs)
    for product in rest:
        first.add_(product)
    return round_to_bf16(first)


def bf16_linear(x: Tensor, y: Tensor, transpose_y: bool = False, round_output: bool = False) -> Tensor:
    """`bf16_matmul`, or `bf16_rounded_output_matmul`, of x [..., I] and a matrix, with a gradient: for programs."""
    return _run("bf16_linear", x, y, transpose_y, x.dtype == paddle.bfloat16, round_output)[0]


def rounded_linear(x: Tensor, y: Tensor, transpose_y: bool = False, round_output: bool = False) -> Tensor:
    """`rounded_matmul`, or `rounded_io_matmul`, of x [..., I] and a matrix, with a gradient: for programs."""
    return _run("rounded_linear", x, y, transpose_y, x.dtype == paddle.bfloat16, round_output)[0]


def rounded_joined_swiglu(both: Tensor) -> Tensor:
    """`joined_swiglu` of gate and up rounded to bfloat16 first, as the products in training return them."""
    return _run("joined_swiglu", both, True)[0]


def rounded_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_matmul` of inputs rounded to bfloat16, by MKL's float32 products."""
    return _grouped("rounded_grouped", x, weight, counts)


def bf16_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_matmul` of inputs rounded to bfloat16, with float32 sums."""
    return _grouped("bf16_grouped", x, weight, counts)


# products of float32 matrices by the processor's instructions for bfloat16


def split_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`MatmulOps.matmul` of float32 inputs, each split into three bfloat16 parts whose sum is the float32 number: about
    as exact as float32 instructions, and faster by AMX. An output is not finite where one of its inputs is not, or is
    above 3.39e38. Only x may have more than two dims.

    Used for thin products too, though MKL's are faster there: a mesh makes products thinner, and results of two kinds
    of kernels would differ more between meshes."""
    return _run("split_product", *_sides([(x, y)]), transpose_x, transpose_y)[0]


def split_sum_matmul(pairs: Pairs, transpose_y: bool) -> Tensor:
    """The sum of the products `split_matmul` of several pairs, in one pass."""
    if len(pairs) == 1:
        return split_matmul(*pairs[0], False, transpose_y)
    return _run("split_product", *_sides(pairs), False, transpose_y)[0]


def split_linear(x: Tensor, y: Tensor, transpose_y: bool = False, round_output: bool = False) -> Tensor:
    """`split_matmul` of x [..., I] and a matrix, with a gradient: for programs."""
    assert not round_output, "outputs of float32 products are not rounded"
    return _run("split_linear", x, y, transpose_y)[0]


def _next_logits(
    rounds: tuple[bool, bool],
    weights: DecoderWeights,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    padding: Tensor,
    cache: Sequence[Tensor],
    cache_len: int,
) -> Tensor:
    """A `decoder.NextLogitsOfWeights`; `rounds`: flags to round the inputs of attention, and to round gate and up."""
    inputs = (x, cos, sin, padding, weights.layers, weights.norm, weights.head, list(cache), weights.eps)
    sizes = (weights.num_queries, weights.intermediate_size, weights.vocab_size)
    has = (weights.has_bias, weights.has_head_norms, weights.is_tied)
    codes = (weights.codes.bits, weights.head_codes.bits, list(weights.codes.levels))
    return paddle._C_ops._run_custom_op("llmsuite_next_logits", *inputs, *sizes, *has, *codes, *rounds, cache_len)[0]


next_logits = functools.partial(_next_logits, (False, False))
rounded_next_logits = functools.partial(_next_logits, (False, True))
"""`next_logits` with gate and up rounded to bfloat16, as in training."""
bf16_next_logits = functools.partial(_next_logits, (True, True))
"""`rounded_next_logits` with the attention of `bf16_attention`, and queries and keys rounded before the rotation as in
training; the entries of the cache have to be rounded already."""


def decoder_for(model: CausalLM) -> DecoderBuilder | None:
    """One new token of each row through all layers of a decoder, in one operation (`next_logits`), and passes over
    several tokens by the kernels of training."""
    return DecoderOps(next_logits, cached_attention).decoder_for(model)


def rounded_decoder_for(model: CausalLM) -> DecoderBuilder | None:
    """`decoder_for` with gate and up rounded to bfloat16, as in training (`next_logits`)."""
    return DecoderOps(rounded_next_logits, cached_attention).decoder_for(model)


def bf16_decoder_for(model: CausalLM) -> DecoderBuilder | None:
    """`rounded_decoder_for` with the attention of `bf16_attention` (`next_logits`)."""
    return DecoderOps(bf16_next_logits, bf16_cached_attention).decoder_for(model)


def packed_matmul(x: Tensor, matrix: PackedWeight) -> Tensor:
    """x [..., I], rounded to bfloat16, times a packed weight, [..., O]: weights are dequantised in registers for a few
    rows, and in blocks that stay in the processor's cache for more."""
    return _run("stored_product", x, matrix.bytes, matrix.codes.bits, list(matrix.codes.levels), matrix.num_outputs)[0]


def packed_grouped_matmul(x: Tensor, stack: PackedWeight, counts: Tensor) -> Tensor:
    """Grouped `packed_matmul`, [N, O]: rows x [N, I], `counts` [E] of them for each matrix of a stack. Trailing rows
    give zeros."""
    codes = (stack.codes.bits, list(stack.codes.levels))
    return _run("stored_grouped", x, stack.bytes, counts, *codes, stack.num_outputs)[0]


def packed_embedding(indices: Tensor, matrix: PackedWeight) -> Tensor:
    """Columns of a packed weight by output index [...], [..., I]: embeddings of tokens."""
    codes = (matrix.codes.bits, list(matrix.codes.levels))
    return _run("stored_outputs", indices, matrix.bytes, *codes, matrix.num_inputs, matrix.num_outputs)[0]


def write_packed(values: Tensor, matrix: PackedWeight, first: int, transposed: bool) -> None:
    """Round values [I, n], or [n, I] with `transposed`, to bf16 into the outputs `first` and following of a packed
    weight."""
    _run("stored_write", values, matrix.bytes, matrix.num_outputs, first, transposed)


def square_sum(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """`optimizer_ops.square_sum` in one pass, on all threads."""
    if not all(_is_plain(x) for x in tensors):
        return optimizer_ops.square_sum(tensors, factor)
    return _run("square_sum", [x.contiguous() for x in tensors], factor)[0]


def scale(x: Tensor, factor: float) -> None:
    """`optimizer_ops.scale` on all threads."""
    if _is_plain(x) and x.is_contiguous():
        _run("scale", x, factor)
    else:
        optimizer_ops.scale(x, factor)


def adamw(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], factor: float, rates: Sequence[float],
    slots: Sequence[Sequence[Tensor]], betas: tuple[float, float], epsilon: float, decays: Sequence[float],
) -> None:  # fmt: skip
    """AdamW update of at least one parameter in one pass, on all threads (Loshchilov and Hutter 2019, arXiv
    1711.05101).

    Args:
        parameters: float32, like their gradients and moments; updated in place, as are the slots.
        gradients: gradients of the parameters.
        factor: factor that the gradients are multiplied by first.
        rates: learning rates, one for each parameter.
        slots: first moments, second moments, and the powers of both betas for this update, one number each; four
            lists with an entry for each parameter.
        betas: decay rates of the moments.
        epsilon: term added to the root of the second moment.
        decays: weight decays, one for each parameter.
    """
    contiguous = [gradient.contiguous() for gradient in gradients]
    _run("adamw", list(parameters), contiguous, *map(list, slots), factor, *betas, epsilon, list(rates), list(decays))


def _is_plain(x: Tensor) -> bool:
    return x.dtype == paddle.float32 and x.size > 0 and not x.is_dist()


def _takes(*tensors: Tensor, dtype: Any = paddle.float32) -> bool:
    """True if the kernels support these tensors."""
    if any(t.dtype != dtype or 0 in t.shape for t in tensors):
        return False
    return not tensors[0].is_dist() or (is_split(tensors[0]) and have_same_layout(tensors))


def _grouped(kernel: str, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    # frozen matrices need no gradient: their operation does not compute it
    return _run(f"{kernel}_{'rows' if weight.stop_gradient else 'product'}", x, weight, counts)[0]


def _on_local_shards(kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    if not tensors[0].is_dist():
        return kernel(*tensors)
    return on_local_shards(kernel, *tensors)


def _spans(q: Tensor) -> Tensor | None:
    """Spans of rows of one document in static programs, None otherwise: Paddle 3.3.1 cannot build a program of
    `dist.to_static` with a missing optional input."""
    if paddle.in_dynamic_mode():
        return None
    return paddle.zeros([q.shape[0], 3, q.shape[1]], "int64")


def _sides(pairs: Pairs) -> tuple[list[Tensor], list[Tensor]]:
    left, right = zip(*pairs)
    return [x.contiguous() for x in left], [y.contiguous() for y in right]


def _run(name: str, *inputs: Any) -> list[Tensor]:
    if paddle.in_dynamic_mode():
        inputs = tuple(x.contiguous() if isinstance(x, paddle.Tensor) else x for x in inputs)
    outputs: list[Tensor] = paddle._C_ops._run_custom_op(f"llmsuite_{name}", *inputs)
    return outputs
