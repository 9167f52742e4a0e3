"""The operations a device may have a fused kernel for, and their plain forms, which run anywhere.

Models use devices through this module only: they compute with the `Ops` they are given, and know no device.

Shapes: B batch, L query length, S key length, H query heads, J key-value heads, K head size, D hidden,
F intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F

from llmsuite.devices.decoder_weights import DecoderWeights, StoredMatrix
from llmsuite.devices.local_parts import are_alike, constant_part, is_split, on_parts, on_rows
from llmsuite.typing import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Activations [..., I] and matrices [I, O] ([O, I] with `transpose_y`), whose products are added up; I may differ."""


def causal_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor:
    """[1, 1, L, S] to be added to scores: 0 where query i may see key j (j <= i + S - L), else -1e9 (-1e4 in fp16).
    With a window W it sees the last W of these keys."""
    last = num_keys - num_queries
    visible = paddle.tril(paddle.ones([num_queries, num_keys], dtype="float32"), last)
    if window is not None:
        visible = paddle.triu(visible, last - window + 1)
    return _added(visible, dtype).unsqueeze([0, 1])


def document_mask(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`causal_mask` of rows of several documents, [B, 1, L, L]; arguments as in `document_spans`."""
    return span_mask(document_spans(document_starts, window), dtype)


def document_spans(document_starts: Tensor, window: int | None = None) -> Tensor:
    """The keys that each token sees in rows of several documents, [B, 3, L]: from the first number up to, but without,
    the second, and from the third up to the token itself.

    `document_starts` [B, L] is, for each token, where in the row its document begins: its place less its position.
    Where this number changes, a new part of the row begins. A part that begins at the number itself is a new document.
    Any other part continues the first tokens of the last document before it, at the position it has: it sees those
    tokens and itself, but nothing between. So several answers share one prompt.

    With a window W a token sees itself and the W - 1 positions of its document before its own.
    """
    at = paddle.arange(document_starts.shape[1], dtype=document_starts.dtype).expand_as(document_starts)
    is_start = paddle.logical_or(document_starts != document_starts.roll(1, 1), at == 0)
    nowhere = paddle.zeros_like(at)
    own = paddle.cummax(paddle.where(is_start, at, nowhere), 1)[0]
    begin = paddle.cummax(paddle.where(paddle.logical_and(is_start, document_starts == at), at, nowhere), 1)[0]
    end = paddle.minimum(begin + own - document_starts, own)
    if window is not None:
        before = window - 1
        begin = paddle.maximum(begin, begin + at - document_starts - before)
        end, own = paddle.maximum(begin, end), paddle.maximum(own, at - before)
    return paddle.stack([begin, end, own], 1)


def span_mask(spans: Tensor, dtype: Any) -> Tensor:
    """The mask to be added to scores, [B, 1, L, L], for the spans of `document_spans` [B, 3, L]."""
    begin, end, own = (part.unsqueeze(-1) for part in spans.unbind(1))
    at = paddle.arange(spans.shape[2], dtype=spans.dtype)
    of_document = paddle.logical_and(at >= begin, at < end)
    of_part = paddle.logical_and(at >= own, at <= at.unsqueeze(-1))
    return _added(paddle.logical_or(of_document, of_part).astype("float32"), dtype).unsqueeze(1)


def step_mask(
    queries: Tensor, keys: Tensor, padding: Tensor, dtype: Any, num_seen: int = 0, window: int | None = None
) -> Tensor:
    """The mask of a pass of generation over a batch that is padded on the left, [B, 1, L, S], to be added to scores.

    Args:
        queries: their columns, [L].
        keys: their columns, [S].
        padding: [B], how many of the first columns of each row nobody sees, behind `num_seen` that everybody sees.
        dtype: of the scores.
        num_seen: see `padding`.
        window: a query sees so many columns at most, its own and the last ones before it.
    """
    hidden = (keys > queries.unsqueeze(1)).unsqueeze(0)
    if window is not None:
        hidden = paddle.logical_or(hidden, (keys <= queries.unsqueeze(1) - window).unsqueeze(0))
    padded = (keys < padding.unsqueeze(1) + num_seen).unsqueeze(1)
    if num_seen:
        padded = paddle.logical_and(padded, keys >= num_seen)
    lowest = 1e4 if dtype == paddle.float16 else 1e9
    return (paddle.logical_or(hidden, padded).astype("float32") * -lowest).astype(dtype).unsqueeze(1)


def _added(visible: Tensor, dtype: Any) -> Tensor:
    return ((visible - 1.0) * (1e4 if dtype == paddle.float16 else 1e9)).astype(dtype)


def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Activations x [..., I] times a matrix y [I, O], either of which may come transposed."""
    return paddle.matmul(x, y, transpose_x, transpose_y)


def sum_of_products(ops: Ops, pairs: Pairs, transpose_y: bool, gives_operand: bool = False) -> Tensor:
    """The sum of the products of several pairs, at least one, in the forms of a device; with `gives_operand` it is
    rounded as `Ops.operand` does, which only a device with `Ops.operand_matmul` can."""
    if gives_operand:
        assert ops.operand_matmul is not None, "the device has operands between products"
        return ops.operand_matmul(pairs, transpose_y)
    if ops.sum_matmul is not None:
        return ops.sum_matmul(pairs, transpose_y)
    first, *rest = (ops.matmul(x, y, False, transpose_y) for x, y in pairs)
    for product in rest:
        first.add_(product)
    return first


def square_sum(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """The sum of squares of the numbers of tensors times a factor, [], which comes first: squares may overflow."""
    return paddle.add_n([x.scale(factor).square_().sum() for x in tensors])


def scale(x: Tensor, factor: float) -> None:
    """x times a number, in place."""
    x.scale_(factor)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of x [N, I] times matrices of weight [E, I, O], to [N, O]: the first counts[0] rows times the first matrix,
    the next counts[1] times the second, and so on, counts [E]. The rows behind these belong to no matrix and give
    zeros. For programs, which do not know the counts while they are made.

    Rows are laid out in blocks of N / E rows, each of one matrix. However uneven the counts are, 2 E blocks hold them:
    so shapes are known, and the work is at most twice that of the rows.
    """
    (num_rows, num_inputs), num_matrices = x.shape, weight.shape[0]
    size, num_blocks = -(-num_rows // num_matrices), 2 * num_matrices
    blocks = (counts + (size - 1)) // size
    block_ends, row_ends, last = blocks.cumsum(), counts.cumsum(), num_matrices - 1
    of_block = paddle.searchsorted(block_ends, paddle.arange(num_blocks, dtype="int64"), right=True).clip(max=last)
    at = paddle.arange(num_rows, dtype="int64")
    of_row = paddle.searchsorted(row_ends, at, right=True)
    shift = (block_ends - blocks) * size - (row_ends - counts)
    # one place behind the blocks is that of rows without a matrix
    behind = paddle.full_like(at, num_blocks * size)
    place = paddle.where(of_row > last, behind, at + shift.index_select(of_row.clip(max=last)))
    # the row at each place; behind the rows is one of zeros, for places without any
    source = paddle.scatter(paddle.full([num_blocks * size + 1], num_rows, "int64"), place, at)[: num_blocks * size]
    laid_out = paddle.concat([x, paddle.zeros([1, num_inputs], x.dtype)]).index_select(source, 0)
    laid_out = laid_out.reshape([num_blocks, size, num_inputs])
    y = paddle.matmul(laid_out, weight.index_select(of_block, 0)).flatten(0, 1)
    return paddle.concat([y, paddle.zeros([1, y.shape[-1]], y.dtype)]).index_select(place, 0)


def dispatch_rows(tokens: Tensor, order: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """Tokens [T, D] to rows [T k, D], sorted by the k experts of each. For programs, as `grouped_matmul`.

    `order` [T k] has the place of each sorted row among all, token by token, `places` [T k] where each of these is
    among the sorted ones. Rows behind the sum of `counts` [E] have no expert here, and any values.
    """
    # once for each choice first: so the gradient is a permutation, and a sum in a fixed order
    (num_tokens, size), num_rows = tokens.shape, order.shape[0]
    copies = tokens.unsqueeze(1).expand([num_tokens, num_rows // num_tokens, size]).reshape([num_rows, size])
    return copies.index_select(order, 0)


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """Sorted rows [T k, D] to the weighted sum of the rows of each token, [T, D]; weights [T, k], the rest as of
    `dispatch_rows`. Rows without an expert have to be zeros."""
    parts = rows.index_select(places, 0).reshape([*weights.shape, rows.shape[-1]])
    return (parts * weights.astype(rows.dtype).unsqueeze(-1)).sum(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`matmul`, plus a bias [O] if there is one."""
    return F.linear(x, weight, bias)


def operand(x: Tensor) -> Tensor:
    """What a product takes, and keeps for the gradient of its matrix: x itself."""
    return x


def attention_operand(x: Tensor) -> Tensor:
    """What the products inside attention take of x: itself."""
    return x


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax(q k^T / sqrt(K) + mask) v. q [B, L, H, K]; k, v [B, S, J, K] -> [B, L, H, K]."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (paddle.stack([x] * groups, 3).reshape([0, 0, -1, x.shape[-1]]) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
    scores = paddle.matmul(q * scale, k, transpose_y=True)
    if mask is not None:
        scores = scores + mask
    return paddle.matmul(F.softmax(scores, -1), v).transpose([0, 2, 1, 3])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim, the mean in float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    wide = x.astype("float32")
    scaled = wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.astype(x.dtype) * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head. x [B, L, H, K]; cos, sin [1, L, 1, K / 2], or with B for rows that differ
    (Su et al. 2021, arXiv 2104.09864)."""
    first, second = paddle.split(x, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202). Both [B, L, F]."""
    return F.silu(gate) * up


def joined_swiglu(both: Tensor) -> Tensor:
    """`swiglu` of gate and up side by side, [B, L, 2 F]."""
    return F.swiglu(both)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-probability of each target. logits [N, V] float32, targets [N] -> [N]."""
    return F.cross_entropy(logits, targets, reduction="none").flatten()


def nll_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-probability of each target, and the entropy of the distribution it is of, in nats. logits [N, V]
    float32, targets [N] -> [N] each."""
    shifted = logits - logits.detach().max(-1, keepdim=True)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    nll = total.log() - paddle.take_along_axis(shifted, targets.unsqueeze(-1), 1).squeeze(-1)
    return nll, entropy_of_sums(total, (exponentials * shifted).sum(-1))


def is_first_choice(logits: Tensor, targets: Tensor) -> Tensor:
    """1 where the target has the largest logit, of equal ones the first, which greedy decoding picks; else 0. logits
    [N, V], targets [N] -> [N] in float32."""
    return (logits.argmax(-1) == targets).astype("float32")


def entropy_of_sums(total: Tensor, weighted: Tensor) -> Tensor:
    """Entropy from two sums over the vocabulary, such as ranks have that hold a part of it each: with x the logits less
    a number m that is the same for all, `total` is the sum of exp(x) and `weighted` that of x exp(x); both [N]."""
    return total.log() - weighted / total


@dataclasses.dataclass(frozen=True)
class Ops:
    """The forms a model uses; a device backend replaces the ones it has a kernel for."""

    causal_mask: Callable[..., Tensor | None] = causal_mask
    """Built once a forward pass for all layers, of the window if there is one; None where `attention` needs none."""
    document_mask: Callable[..., Tensor] = document_mask
    """The mask of rows of several documents, in the form that `attention` takes; with a window as `causal_mask`."""
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = attention
    attention_operand: Callable[[Tensor], Tensor] = attention_operand
    """What the products inside `attention` take of queries, keys, values and weights, as float32: for generation, whose
    attention is of other operations. See `attends_operands`."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = rotary
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    """The logits are needed for nothing else: their memory may be taken."""
    matmul: Callable[[Tensor, Tensor, bool, bool], Tensor] = matmul
    """Takes plain tensors. A form of a device has no gradient: `llmsuite.models.products` makes it."""
    sum_matmul: Callable[[Pairs, bool], Tensor] | None = None
    """`sum_of_products` of at least one pair. None: products of each, which are added."""
    operand_matmul: Callable[[Pairs, bool], Tensor] | None = None
    """`sum_of_products` whose output is rounded as `operand` does. Then what lies between the products of an MLP is
    rounded too, and so are its gradients (for attention see `attends_operands`). None: outputs are not rounded."""
    program_matmul: Callable[..., Tensor] | None = None
    """`matmul` with a gradient, for programs. Takes x, a matrix, whether the matrix is transposed, and whether the
    output is rounded as that of `operand_matmul`. None: `matmul` is Paddle's own, or has no form for programs."""
    operand: Callable[[Tensor], Tensor] = operand
    operand_cross_entropy: Callable[[Tensor, Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]] | None = None
    """`cross_entropy` of at least one plain token, and a function from the gradient of its output to what `operand`
    makes of the logits' gradient, called once. Paddle knows no gradient of it. None: the one and then the other."""
    grouped_matmul: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_matmul
    """For programs, with a gradient; takes plain tensors. So do the two that follow."""
    dispatch_rows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = dispatch_rows
    combine_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = combine_rows
    joined_swiglu: Callable[[Tensor], Tensor] = joined_swiglu
    """For generation: a kernel has no gradient."""
    square_sum: Callable[[Sequence[Tensor], float], Tensor] = square_sum
    """For the norm of the gradients, as the next one is for gradients before an update: not differentiated."""
    scale: Callable[[Tensor, float], None] = scale
    adamw: Callable[..., None] | None = None
    """Updates plain float32 parameters in place: by their gradients, a factor of these, their rates, [both moments,
    powers of both betas], the betas, epsilon and weight decays. None: Paddle's own."""
    next_logits: Callable[[DecoderWeights, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor], int], Tensor] | None = None
    """One new token of each row through a whole decoder: embeddings [B, D], cos and sin [B, 1, 1, K / 2], numbers of
    padding columns [B], a cache with free columns, [B, J, S, K] float32 or bfloat16 each, and how many columns are
    filled, to logits [B, V]; writes keys and values, as `attention_operand` makes them. None: layer by layer."""
    cached_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """`attention` of new tokens [B, L, H, K] over the filled columns of a cache, [B, J, S, K] each and perhaps views,
    with spans [B, 3, L] as of `document_spans`. `next_logits` is used by devices with both."""
    stored_product: Callable[[Tensor, StoredMatrix], Tensor] | None = None
    """x [..., I], rounded to bfloat16, times a stored matrix, [..., O] in float32. None: no such matrices there."""
    stored_grouped: Callable[[Tensor, StoredMatrix, Tensor], Tensor] | None = None
    """Rows [N, I], so many [E] for each matrix of a stored stack, likewise; those behind give zeros. None as before."""
    stored_outputs: Callable[[Tensor, StoredMatrix], Tensor] | None = None
    """Outputs, by number [...], of a stored matrix, [..., I] in float32: embeddings of words. None as before."""
    stored_write: Callable[[Tensor, StoredMatrix, int, bool], None] | None = None
    """Writes values [I, n], or turned [n, I], into a matrix stored in bf16, from an output on. None as before."""
    heads_first: bool = False
    """Whether `attention` and the cache have keys and values as [B, J, S, K]: for generation, where transposing the
    whole cache in every pass would take longer than all else."""

    @property
    def attends_operands(self) -> bool:
        """Whether `rotary` and `attention` take and give tensors that are rounded by `operand`, and their gradients."""
        return self.operand_matmul is not None and self.attention_operand is not attention_operand


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Flash attention, causal by itself. A single query sees every key, so it needs no causality.

    A mask is in the form of `document_ends`; tiles between documents are skipped (FlashMask, arXiv 2410.01359). Each
    rank has its own heads, as in `llmsuite.devices.local_parts`; in a program Paddle's rule splits them.
    """
    if is_split(q) and are_alike([q, k, v]):
        mask = None if mask is None else constant_part(mask)  # `recompute` (Paddle 3.3.1) makes it a distributed one
        return on_parts(lambda q, k, v: flash_attention(q, k, v, mask), q, k, v)
    if mask is not None:
        assert mask.dtype == paddle.int32, "flash attention is given its causality as a flag"
        if mask.shape[0] != q.shape[0]:  # a window alone is the same in all rows
            mask = mask.expand([q.shape[0], *mask.shape[1:]])
        return F.flashmask_attention(q, k, v, mask, causal=True)
    output, _ = F.flash_attention.flash_attention(q, k, v, causal=q.shape[1] > 1)
    return output


def document_ends(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`document_mask` as flash attention takes it, [B, 1, L, 1] int32: the first row of scores that does not see a key,
    which is where the key's document ends, or has left it behind its window. The parts of a document that continue its
    first tokens (`document_spans`) have to continue as many of them, as behind a prefix; there are none with a window,
    for which rows between those that see a key would not see it."""
    length = document_starts.shape[1]
    at = paddle.arange(length, dtype=document_starts.dtype).expand_as(document_starts)
    _, end, own = document_spans(document_starts).unbind(1)
    # padding that is marked continues nothing
    is_new = paddle.logical_or(document_starts == at, paddle.logical_and(document_starts <= 0, own == at))
    part_ends, document_ends = _next_begins(own == at, at), _next_begins(is_new, at)
    last_part = paddle.take_along_axis(end, document_ends - 1, 1)  # as many tokens as each part continues
    ends = paddle.where(at < last_part, document_ends, part_ends)
    if window is not None:
        ends = paddle.minimum(ends, at + window)
    return ends.astype("int32").unsqueeze([1, 3])


def _next_begins(is_begin: Tensor, at: Tensor) -> Tensor:
    """Behind each place of a row, the next one that begins something; the length where none does."""
    length = paddle.full_like(at[:, :1], at.shape[1])
    begins = paddle.where(is_begin, at, length.expand_as(at))
    following = paddle.concat([begins[:, 1:], length], 1)
    return paddle.cummin(following.flip(1), 1)[0].flip(1)


def no_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor | None:
    """For attention kernels that are causal by themselves, which need as many queries as keys, or one query. With a
    window, as `document_ends`, [1, 1, L, 1]: the keys of a single query are none that flash attention leaves out."""
    assert num_queries in (1, num_keys), "chunked prefill is not supported with flash attention"
    if window is None:
        return None
    assert num_queries == num_keys, "a single query has no window with flash attention"
    return (paddle.arange(num_keys, dtype="int32") + window).clip(max=num_keys).reshape([1, 1, -1, 1])


def fused_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary` in one kernel, which takes cos and sin for both halves."""
    cos, sin = (paddle.concat([t, t], axis=-1) for t in (cos, sin))
    shape = x.shape
    if cos.shape[0] > 1:  # the kernel takes one rotation for all rows: so all rows are made one
        x, cos, sin = (t.reshape([1, -1, *t.shape[2:]]) for t in (x, cos, sin))
    rotated, _, _ = paddle.incubate.nn.functional.fused_rotary_position_embedding(
        x, None, None, sin=sin, cos=cos, use_neox_rotary_style=False
    )
    return rotated.reshape(shape)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one kernel, for which Paddle has no rule: `llmsuite.devices.local_parts`."""
    if not x.is_dist():
        return F.rms_norm(x, [x.shape[-1]], weight, eps)[0]
    if not is_split(x):
        return rms_norm(x, weight, eps)
    return on_rows(lambda rows, gain: F.rms_norm(rows, [rows.shape[-1]], gain, eps)[0], x, weight)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in one kernel."""
    return F.swiglu(gate, up)
