"""The operations of `llmsuite.devices.ops` by the kernels of this directory; equal to the plain forms up to rounding.

Each rank computes its local part of distributed tensors. What a kernel cannot take goes to the plain form: numbers that
are not float32, and distributed tensors inside a program of `paddle.jit.to_static`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from llmsuite.devices import ops
from llmsuite.devices.cpu.build import Library
from llmsuite.devices.cpu.kernels.source import KERNELS, build_kernels
from llmsuite.devices.decoder_weights import DecoderWeights, StoredMatrix
from llmsuite.devices.local_parts import are_alike, constant_part, is_split, on_parts, on_rows
from llmsuite.typing import Tensor


@functools.cache  # Paddle loads a library only once
def load(what: Library = KERNELS) -> bool:
    """Build the kernels, if need be, and register them with Paddle; False when they cannot be built."""
    library = build_kernels(what)
    if library is not None:
        paddle.utils.cpp_extension.load_op_meta_info_and_register_op(str(library))
    return library is not None


def no_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor | None:
    """`causal_mask` of an attention that is causal by itself. With a window, as `spans`, [1, 3, L]."""
    if window is None:
        return None
    assert num_queries == num_keys, "spans are of as many queries as keys"
    return ops.document_spans(paddle.zeros([1, num_keys], "int64"), window)


def spans(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`document_mask` as `attention` takes it: `ops.document_spans`, [B, 3, L]."""
    return ops.document_spans(document_starts, window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention that computes no score of a key which a token does not see. A mask is in the form of `spans`, or
    is added to the scores, as in generation."""
    return _attention("attention", q, k, v, mask)


def bf16_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`attention` whose products, and those of its gradients, are of inputs rounded to bfloat16, with float32 sums. Of
    bfloat16 inputs the output is bfloat16, and so are the gradients."""
    return _attention("bf16_attention", q, k, v, mask)


def _attention(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None and mask.dtype != paddle.int64:
        return ops.attention(q, k, v, mask)
    is_operand = q.dtype == paddle.bfloat16
    if not _takes(q, k, v, dtype=paddle.bfloat16 if is_operand else paddle.float32):
        plain = ops.causal_mask(q.shape[1], k.shape[1], q.dtype) if mask is None else ops.span_mask(mask, q.dtype)
        return ops.attention(q, k, v, plain)
    given = None if mask is None else constant_part(mask)
    return _on_parts(lambda *local: _run(kernel, *local, _spans(local[0]) if given is None else given)[0], q, k, v)


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, spans: Tensor) -> Tensor:
    """`attention` of the newest tokens of a cache, which is read where it is; for generation, without a gradient."""
    return _cached_attention("attention", q, keys, values, spans)


def bf16_cached_attention(q: Tensor, keys: Tensor, values: Tensor, spans: Tensor) -> Tensor:
    """`cached_attention` with the products of `bf16_attention`."""
    return _cached_attention("bf16_attention", q, keys, values, spans)


def _cached_attention(kernel: str, q: Tensor, keys: Tensor, values: Tensor, spans: Tensor) -> Tensor:
    columns = [part.transpose([0, 2, 1, 3]) for part in (keys, values)]  # views
    found: list[Tensor] = paddle._C_ops._run_custom_op(
        f"llmsuite_{kernel}", q.contiguous(), *columns, spans.contiguous()
    )
    return found[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm` in one pass."""
    if not _takes(x) or x.is_dist() != weight.is_dist():
        return ops.rms_norm(x, weight, eps)
    if not x.is_dist():
        return _run("rms_norm", x, weight, eps)[0]
    return on_rows(lambda rows, gain: _run("rms_norm", rows, gain, eps)[0], x, weight)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.rotary` in one pass, of bfloat16 inputs too, which is computed in float32."""
    if not _takes(x, dtype=paddle.bfloat16 if x.dtype == paddle.bfloat16 else paddle.float32):
        return ops.rotary(x, cos, sin)
    return _on_parts(lambda local: _run("rotary", local, constant_part(cos), constant_part(sin))[0], x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`ops.swiglu` in one pass, of bfloat16 inputs too, which is computed in float32."""
    is_operand = gate.dtype == paddle.bfloat16
    if is_operand and 0 in gate.shape:  # no plain form takes bfloat16 here
        return _run("swiglu", gate, up)[0]
    if not _takes(gate, up, dtype=paddle.bfloat16 if is_operand else paddle.float32):
        return ops.swiglu(gate, up)
    return _on_parts(lambda *local: _run("swiglu", *local)[0], gate, up)


def joined_swiglu(both: Tensor) -> Tensor:
    """`ops.joined_swiglu` in one pass; for generation, without a gradient."""
    return _run("joined_swiglu", both, False)[0] if _takes(both) else ops.joined_swiglu(both)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """`ops.cross_entropy` of logits that nothing else needs: their gradient takes their memory."""
    if not _takes(logits) or (logits.is_dist() and paddle.in_dynamic_mode()):
        return ops.cross_entropy(logits, targets)
    return _on_parts(lambda local: _run("cross_entropy", local, constant_part(targets))[0], logits)


def bf16_operand_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`cross_entropy` whose gradient is rounded to bfloat16 where it is made, in memory of the logits."""
    nll, sums = _run("cross_entropy", logits, targets)
    return nll, lambda given: _run("cross_entropy_back", logits, targets, sums, given)[0]


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`ops.grouped_matmul` by one product a matrix, of its rows and no others."""
    return _grouped("grouped", x, weight, counts) if _takes(x, weight) else ops.grouped_matmul(x, weight, counts)


def dispatch_rows(tokens: Tensor, order: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """`ops.dispatch_rows` in one pass each way; rows without an expert are zeros."""
    if not _takes(tokens):
        return ops.dispatch_rows(tokens, order, places, counts)
    return _run("dispatch_rows", tokens, order, places, counts)[0]


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """`ops.combine_rows` in one pass each way, without a copy of the rows."""
    if not _takes(rows, weights):
        return ops.combine_rows(rows, weights, order, places, counts)
    return _run("combine_rows", rows, weights, order, places, counts)[0]


# products of inputs that are rounded to bfloat16, with float32 sums


def bf16_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`ops.matmul` of inputs rounded to bfloat16, with float32 sums; they are float32, or rounded already. Nothing but
    x has more than two dims."""
    return _run("bf16_product", *_sides([(x, y)]), transpose_x, transpose_y, False)[0]


def bf16_sum_matmul(pairs: ops.Pairs, transpose_y: bool) -> Tensor:
    """The sum of the products `bf16_matmul` of several pairs, in one pass."""
    return _run("bf16_product", *_sides(pairs), False, transpose_y, False)[0]


def bf16_operand_matmul(pairs: ops.Pairs, transpose_y: bool) -> Tensor:
    """`bf16_sum_matmul`, whose sums are rounded to bfloat16 where they are made."""
    return _run("bf16_product", *_sides(pairs), False, transpose_y, True)[0]


def bf16_operand(x: Tensor) -> Tensor:
    """x rounded to bfloat16: half of the memory. What is rounded already is x itself."""
    return x if x.dtype == paddle.bfloat16 else _run("round_bf16", x)[0]


def bf16_attention_operand(x: Tensor) -> Tensor:
    """x rounded to bfloat16, as float32."""
    return _run("rounded", x)[0]


def rounded_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`bf16_matmul` for processors whose instructions for it are slower than those for float32, or that have none: a
    float32 product of rounded inputs, by MKL."""
    x, y = (_run("rounded", t)[0] for t in (x, y))
    return paddle.matmul(x, y, transpose_x, transpose_y)


def rounded_operand_matmul(pairs: ops.Pairs, transpose_y: bool) -> Tensor:
    """`bf16_operand_matmul` likewise."""
    first, *rest = (rounded_matmul(x, y, False, transpose_y) for x, y in pairs)
    for product in rest:
        first.add_(product)
    return bf16_operand(first)


def bf16_linear(x: Tensor, y: Tensor, transpose_y: bool = False, gives_operand: bool = False) -> Tensor:
    """`bf16_matmul`, or `bf16_operand_matmul`, of x [..., I] and a matrix, with a gradient: for programs."""
    return _run("bf16_linear", x, y, transpose_y, x.dtype == paddle.bfloat16, gives_operand)[0]


def rounded_linear(x: Tensor, y: Tensor, transpose_y: bool = False, gives_operand: bool = False) -> Tensor:
    """`rounded_matmul`, or `rounded_operand_matmul`, of x [..., I] and a matrix, with a gradient: for programs."""
    return _run("rounded_linear", x, y, transpose_y, x.dtype == paddle.bfloat16, gives_operand)[0]


def rounded_joined_swiglu(both: Tensor) -> Tensor:
    """`joined_swiglu` of gate and up as products give them in training: rounded to bfloat16, here as float32."""
    return _run("joined_swiglu", both, True)[0]


def rounded_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_matmul` of inputs rounded to bfloat16, by MKL's products of float32."""
    return _grouped("rounded_grouped", x, weight, counts)


def bf16_grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`grouped_matmul` of inputs rounded to bfloat16, with float32 sums."""
    return _grouped("bf16_grouped", x, weight, counts)


def plain_rounded_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`rounded_matmul` by Paddle's casts, where there is no compiler."""
    x, y = (t.astype("bfloat16").astype("float32") for t in (x, y))
    return paddle.matmul(x, y, transpose_x, transpose_y)


def plain_rounded_operand(x: Tensor) -> Tensor:
    """`bf16_operand` by Paddle's cast."""
    return x.astype("bfloat16")


# products of float32 matrices by the processor's instructions for bfloat16


def split_matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """`ops.matmul` in three bfloat16 parts, which together are the float32 number: about as exact as by float32
    instructions, and faster by AMX. An output is not finite where an input of it is not, or is above 3.39e38. Nothing
    but x has more than two dims.

    Thin products too, of which MKL's are faster: a mesh makes products thinner, and sums of two kinds would be further
    from each other."""
    return _run("split_product", *_sides([(x, y)]), transpose_x, transpose_y)[0]


def split_sum_matmul(pairs: ops.Pairs, transpose_y: bool) -> Tensor:
    """The sum of the products `split_matmul` of several pairs, in one pass."""
    if len(pairs) == 1:
        return split_matmul(*pairs[0], False, transpose_y)
    return _run("split_product", *_sides(pairs), False, transpose_y)[0]


def split_linear(x: Tensor, y: Tensor, transpose_y: bool = False, gives_operand: bool = False) -> Tensor:
    """`split_matmul` of x [..., I] and a matrix, with a gradient: for programs."""
    assert not gives_operand, "nothing is rounded between products"
    return _run("split_linear", x, y, transpose_y)[0]


def _next_logits(
    rounds: tuple[bool, bool],
    weights: DecoderWeights,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    padding: Tensor,
    cache: Sequence[Tensor],
    filled: int,
) -> Tensor:
    """`rounds`: whether what attention takes is rounded, and whether gate and up are."""
    inputs = (x, cos, sin, padding, weights.layers, weights.norm, weights.head, list(cache), weights.eps)
    sizes = (weights.num_queries, weights.intermediate_size, weights.vocab_size)
    has = (weights.has_bias, weights.has_head_norms, weights.is_tied)
    codes = (weights.codes.bits, weights.head_codes.bits, list(weights.codes.levels))
    return paddle._C_ops._run_custom_op("llmsuite_next_logits", *inputs, *sizes, *has, *codes, *rounds, filled)[0]


# what `llmsuite doctor` shows of them
next_logits = functools.partial(_next_logits, (False, False))
next_logits.__doc__ = "One new token of each row through a whole decoder, in one operation; see `ops.Ops`."
rounded_next_logits = functools.partial(_next_logits, (False, True))
rounded_next_logits.__doc__ = "`next_logits` with gate and up rounded to bfloat16, as in training."
bf16_next_logits = functools.partial(_next_logits, (True, True))
bf16_next_logits.__doc__ = (
    "`rounded_next_logits` with the attention of `bf16_attention`, and queries and keys rounded before the rotation as "
    "in training; what is in the cache has to be rounded already."
)


def stored_product(x: Tensor, matrix: StoredMatrix) -> Tensor:
    """x [..., I], rounded to bfloat16, times a stored matrix, [..., O]: for a few rows weights are widened in
    registers, for more in parts that stay in the cache."""
    return _run("stored_product", x, matrix.bytes, matrix.codes.bits, list(matrix.codes.levels), matrix.num_outputs)[0]


def stored_grouped(x: Tensor, stack: StoredMatrix, counts: Tensor) -> Tensor:
    """`stored_product` of rows x [N, I], so many `counts` [E] for each matrix of a stack: [N, O]. Rows behind them give
    zeros."""
    codes = (stack.codes.bits, list(stack.codes.levels))
    return _run("stored_grouped", x, stack.bytes, counts, *codes, stack.num_outputs)[0]


def stored_outputs(numbers: Tensor, matrix: StoredMatrix) -> Tensor:
    """Outputs of a stored matrix by their numbers [...], [..., I]."""
    codes = (matrix.codes.bits, list(matrix.codes.levels))
    return _run("stored_outputs", numbers, matrix.bytes, *codes, matrix.num_inputs, matrix.num_outputs)[0]


def stored_write(values: Tensor, matrix: StoredMatrix, first: int, turned: bool) -> None:
    """Round values [I, n], or turned [n, I], into the outputs of a matrix stored in bf16, from the `first` on."""
    _run("stored_write", values, matrix.bytes, matrix.num_outputs, first, turned)


def square_sum(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """`ops.square_sum` in one pass, on all threads."""
    if not all(_is_plain(x) for x in tensors):
        return ops.square_sum(tensors, factor)
    return _run("square_sum", [x.contiguous() for x in tensors], factor)[0]


def scale(x: Tensor, factor: float) -> None:
    """`ops.scale` on all threads."""
    if _is_plain(x) and x.is_contiguous():
        _run("scale", x, factor)
    else:
        ops.scale(x, factor)


def adamw(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], factor: float, rates: Sequence[float],
    slots: Sequence[Sequence[Tensor]], betas: tuple[float, float], epsilon: float, decays: Sequence[float],
) -> None:  # fmt: skip
    """Updates by AdamW of at least one parameter in one pass, on all threads.

    Args:
        parameters: float32, like their gradients and moments; they change, and so do the slots.
        gradients: of the parameters.
        factor: what the gradients are multiplied by first.
        rates: the learning rates, one for each parameter.
        slots: first moments, second moments, and both decay rates to the power of this update's number, one number
            each; every one as many as parameters.
        betas: decay rates of the moments.
        epsilon: what is added to the root of the second moment.
        decays: of the weights, one for each parameter.
    """
    given = [gradient.contiguous() for gradient in gradients]
    _run("adamw", list(parameters), given, *map(list, slots), factor, *betas, epsilon, list(rates), list(decays))


def _is_plain(x: Tensor) -> bool:
    return x.dtype == paddle.float32 and x.size > 0 and not x.is_dist()


def _takes(*tensors: Tensor, dtype: Any = paddle.float32) -> bool:
    """Whether the kernels can take them."""
    if any(t.dtype != dtype or 0 in t.shape for t in tensors):
        return False
    return not tensors[0].is_dist() or (is_split(tensors[0]) and are_alike(tensors))


def _grouped(kernel: str, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    # of matrices that are not trained no gradient is made
    return _run(f"{kernel}_{'rows' if weight.stop_gradient else 'product'}", x, weight, counts)[0]


def _on_parts(kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return on_parts(kernel, *tensors) if tensors[0].is_dist() else kernel(*tensors)


def _spans(q: Tensor) -> Tensor | None:
    """Spans of rows of one document, where they have to be given: without an optional input Paddle 3.3.1 makes no
    program of `dist.to_static`."""
    if paddle.in_dynamic_mode():
        return None
    return paddle.zeros([q.shape[0], 3, q.shape[1]], "int64")


def _sides(pairs: ops.Pairs) -> tuple[list[Tensor], list[Tensor]]:
    left, right = zip(*pairs)
    return [x.contiguous() for x in left], [y.contiguous() for y in right]


def _run(name: str, *inputs: Any) -> list[Tensor]:
    if paddle.in_dynamic_mode():
        inputs = tuple(x.contiguous() if isinstance(x, paddle.Tensor) else x for x in inputs)
    found: list[Tensor] = paddle._C_ops._run_custom_op(f"llmsuite_{name}", *inputs)
    return found
