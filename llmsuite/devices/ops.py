"""The operations that a device may have fused kernels for, and their plain forms, which run anywhere.

Models use devices through this module only: they compute with the `Ops` that they are given, and know no device.

Shapes: B batch, L query length, S key length, H query heads, J key-value heads, K head size, D hidden,
F intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices.decoder_weights import DecoderWeights, PackedWeight
from llmsuite.devices.local_parts import have_same_layout, is_split, local_constant, on_local_rows, on_local_shards

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Pairs of activations [..., I] and matrices [I, O] ([O, I] with `transpose_y`) whose products are summed; I may
differ between pairs."""


def causal_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor:
    """Causal mask [1, 1, L, S], added to scores: 0 where query i sees key j (j <= i + S - L), else -1e9 (-1e4 in fp16,
    whose largest number is 65504). With a window W a query sees the last W of these keys."""
    last = num_keys - num_queries
    visible = paddle.tril(paddle.ones([num_queries, num_keys], dtype="float32"), last)
    if window is not None:
        visible = paddle.triu(visible, last - window + 1)
    return _to_added_mask(visible, dtype).unsqueeze([0, 1])


def document_mask(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`causal_mask` of rows of several documents, [B, 1, L, L]; arguments as in `document_spans`."""
    return span_mask(document_spans(document_starts, window), dtype)


def document_spans(document_starts: Tensor, window: int | None = None) -> Tensor:
    """The keys that each token sees in rows of several documents, [B, 3, L]: keys from the first index up to, but not
    including, the second one, and keys from the third index up to the token itself.

    `document_starts` [B, L] is, for each token, the index in the row where its document begins: the token's index minus
    its position. Where this number changes, a new part of the row begins. A part whose first token has that index is a
    new document. Any other part continues the first tokens of the last document before it, at its position: it sees
    those tokens and itself, but nothing between. So several answers can share one prompt.

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
        end = paddle.maximum(begin, end)
        own = paddle.maximum(own, at - before)
    return paddle.stack([begin, end, own], 1)


def span_mask(spans: Tensor, dtype: Any) -> Tensor:
    """The mask [B, 1, L, L], added to scores, for the spans of `document_spans` [B, 3, L]."""
    begin, end, own = (part.unsqueeze(-1) for part in spans.unbind(1))
    at = paddle.arange(spans.shape[2], dtype=spans.dtype)
    of_document = paddle.logical_and(at >= begin, at < end)
    of_part = paddle.logical_and(at >= own, at <= at.unsqueeze(-1))
    return _to_added_mask(paddle.logical_or(of_document, of_part).astype("float32"), dtype).unsqueeze(1)


def step_mask(
    queries: Tensor, keys: Tensor, padding: Tensor, dtype: Any, prefix_len: int = 0, window: int | None = None
) -> Tensor:
    """The mask of a pass of generation over a batch that is padded on the left, [B, 1, L, S], added to scores.

    Args:
        queries: columns of the queries, [L].
        keys: columns of the keys, [S].
        padding: [B], number of padding columns of each row; they come after `prefix_len` columns that all queries see.
        dtype: dtype of the scores.
        prefix_len: number of columns of a prefix (prefix tuning).
        window: size of the attention window in columns, with the query's own; None for full causal attention.
    """
    hidden = (keys > queries.unsqueeze(1)).unsqueeze(0)
    if window is not None:
        hidden = paddle.logical_or(hidden, (keys <= queries.unsqueeze(1) - window).unsqueeze(0))
    padded = (keys < padding.unsqueeze(1) + prefix_len).unsqueeze(1)
    if prefix_len:
        padded = paddle.logical_and(padded, keys >= prefix_len)
    lowest = 1e4 if dtype == paddle.float16 else 1e9
    return (paddle.logical_or(hidden, padded).astype("float32") * -lowest).astype(dtype).unsqueeze(1)


def _to_added_mask(visible: Tensor, dtype: Any) -> Tensor:
    return ((visible - 1.0) * (1e4 if dtype == paddle.float16 else 1e9)).astype(dtype)


def identity(x: Tensor) -> Tensor:
    """x: where a layer has nothing to reduce, to drop or to cut."""
    return x


def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Activations x [..., I] times a matrix y [I, O], either of which may be given transposed: [..., O]."""
    return paddle.matmul(x, y, transpose_x, transpose_y)


def sum_of_products(ops: Ops, pairs: Pairs, transpose_y: bool, round_output: bool = False) -> Tensor:
    """The sum of the products of at least one pair, [..., O], by the device's kernels; with `round_output` it is
    rounded as `Ops.round_activation` does, which needs `Ops.rounded_output_matmul`."""
    if round_output:
        assert ops.rounded_output_matmul is not None, "the device rounds outputs of products"
        return ops.rounded_output_matmul(pairs, transpose_y)
    if ops.sum_matmul is not None:
        return ops.sum_matmul(pairs, transpose_y)
    first, *rest = (ops.matmul(x, y, False, transpose_y) for x, y in pairs)
    for product in rest:
        first.add_(product)
    return first


def square_sum(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """The sum of squares of all elements of tensors, each multiplied by a factor first, so that squares do not
    overflow: a scalar []."""
    return paddle.add_n([x.scale(factor).square_().sum() for x in tensors])


def scale(x: Tensor, factor: float) -> None:
    """Multiply x by a number, in place."""
    x.scale_(factor)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Grouped product, [N, O], for static programs, which do not know `counts` [E] while they are traced.

    The first counts[0] rows of x [N, I] are multiplied by the first matrix of weight [E, I, O], the next counts[1] by
    the second, and so on. Trailing rows belong to no matrix and give zeros.

    Rows are laid out in blocks of N / E rows, each of one matrix. However uneven the counts are, 2 E blocks hold them:
    so shapes are known, and the work is at most twice that of the rows.
    """
    num_rows, num_inputs = x.shape
    num_matrices = weight.shape[0]
    size = -(-num_rows // num_matrices)
    num_blocks = 2 * num_matrices
    blocks = (counts + (size - 1)) // size
    block_ends = blocks.cumsum()
    row_ends = counts.cumsum()
    last = num_matrices - 1
    of_block = paddle.searchsorted(block_ends, paddle.arange(num_blocks, dtype="int64"), right=True).clip(max=last)
    rows = paddle.arange(num_rows, dtype="int64")
    of_row = paddle.searchsorted(row_ends, rows, right=True)
    shift = (block_ends - blocks) * size - (row_ends - counts)
    # rows without a matrix share one extra slot after the blocks
    no_slot = paddle.full_like(rows, num_blocks * size)
    slot = paddle.where(of_row > last, no_slot, rows + shift.index_select(of_row.clip(max=last)))
    # the row in each slot; slots without a row get an extra row of zeros after all rows
    source = paddle.scatter(paddle.full([num_blocks * size + 1], num_rows, "int64"), slot, rows)[: num_blocks * size]
    laid_out = paddle.concat([x, paddle.zeros([1, num_inputs], x.dtype)]).index_select(source, 0)
    laid_out = laid_out.reshape([num_blocks, size, num_inputs])
    y = paddle.matmul(laid_out, weight.index_select(of_block, 0)).flatten(0, 1)
    return paddle.concat([y, paddle.zeros([1, y.shape[-1]], y.dtype)]).index_select(slot, 0)


def dispatch_rows(tokens: Tensor, order: Tensor, inverse_order: Tensor, counts: Tensor) -> Tensor:
    """Copy tokens [T, D] to rows [T k, D], sorted by the k experts of each. For static programs, as `grouped_matmul`.

    `order` [T k] has the index of each sorted row among all rows, token by token; `inverse_order` [T k] is its inverse.
    Rows after the first sum(counts), counts [E], have no expert on this rank, and arbitrary values.
    """
    # copied k times first: then the gradient is a permutation and a sum in a fixed order, not a scatter-add
    num_tokens, size = tokens.shape
    num_rows = order.shape[0]
    copies = tokens.unsqueeze(1).expand([num_tokens, num_rows // num_tokens, size]).reshape([num_rows, size])
    return copies.index_select(order, 0)


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor, inverse_order: Tensor, counts: Tensor) -> Tensor:
    """The weighted sum of the rows of each token, [T, D], from sorted rows [T k, D] and weights [T, k]; the other
    arguments as for `dispatch_rows`. Rows without an expert have to be zeros."""
    parts = rows.index_select(inverse_order, 0).reshape([*weights.shape, rows.shape[-1]])
    return (parts * weights.astype(rows.dtype).unsqueeze(-1)).sum(1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times a matrix [I, O], plus a bias [O] if there is one: [..., O]."""
    return F.linear(x, weight, bias)


def round_activation(x: Tensor) -> Tensor:
    """x as a product takes it, and saves it for the gradient of its matrix: unchanged."""
    return x


def round_attention_input(x: Tensor) -> Tensor:
    """x as the products inside attention take it: unchanged."""
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
    """x / rms(x) * weight over the last dim, normalised in float32 (RMSNorm, Zhang and Sennrich 2019, arXiv
    1910.07467)."""
    wide = x.astype("float32")
    scaled = wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.astype(x.dtype) * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head (RoPE, Su et al. 2021, arXiv 2104.09864). x [B, L, H, K]; cos, sin
    [1, L, 1, K / 2], or [B, L, 1, K / 2] where rows differ."""
    first, second = paddle.split(x, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202). Both [B, L, F]."""
    return F.silu(gate) * up


def joined_swiglu(both: Tensor) -> Tensor:
    """`swiglu` of gate and up concatenated, [B, L, 2 F], to [B, L, F]."""
    return F.swiglu(both)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-probability of each target. logits [N, V] float32, targets [N] -> [N]."""
    return F.cross_entropy(logits, targets, reduction="none").flatten()


def nll_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-probability of each target, and the entropy of its distribution in nats. logits [N, V] float32,
    targets [N] -> [N] each."""
    # the largest logit is subtracted, so that no exponential overflows
    shifted = logits - logits.detach().max(-1, keepdim=True)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    nll = total.log() - paddle.take_along_axis(shifted, targets.unsqueeze(-1), 1).squeeze(-1)
    return nll, entropy_of_sums(total, (exponentials * shifted).sum(-1))


def is_greedy_match(logits: Tensor, targets: Tensor) -> Tensor:
    """1 where the target is the choice of greedy decoding: the largest logit, the first one of equal ones; else 0.
    logits [N, V], targets [N] -> [N] in float32."""
    return (logits.argmax(-1) == targets).astype("float32")


def entropy_of_sums(total: Tensor, weighted: Tensor) -> Tensor:
    """Entropy [N] in nats from two sums over the vocabulary, which ranks with a shard of it can all-reduce: with x the
    logits minus a number m that is the same on all ranks, `total` [N] is the sum of exp(x), and `weighted` [N] that of
    x exp(x)."""
    return total.log() - weighted / total


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations that a model computes with; a device backend replaces those that it has kernels for."""

    causal_mask: Callable[..., Tensor | None] = causal_mask
    """The causal mask, computed once per forward pass for all layers; None where `attention` needs none."""
    document_mask: Callable[..., Tensor] = document_mask
    """The mask of rows of several documents, in the form that `attention` takes; with a window as `causal_mask`."""
    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = attention
    round_attention_input: Callable[[Tensor], Tensor] = round_attention_input
    """Rounds an input of the products inside `attention` (queries, keys, values and weights), and returns it as
    float32: for generation, whose attention consists of other operations. See `rounds_attention`."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = rotary
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    """It may overwrite the logits, which nothing else needs."""
    matmul: Callable[[Tensor, Tensor, bool, bool], Tensor] = matmul
    """Takes plain tensors. A device's kernel has no gradient: `llmsuite.models.linear_ops` computes it."""
    sum_matmul: Callable[[Pairs, bool], Tensor] | None = None
    """`sum_of_products` of at least one pair, in one operation. None: the products are computed, then added."""
    rounded_output_matmul: Callable[[Pairs, bool], Tensor] | None = None
    """`sum_of_products` whose output is rounded as `round_activation` does. Then the activations between the products
    of an MLP are rounded too, and so are their gradients (for attention see `rounds_attention`). None: outputs are not
    rounded."""
    program_matmul: Callable[..., Tensor] | None = None
    """`matmul` with a gradient, for static programs. Takes x, a matrix, a flag for a transposed matrix, and a flag to
    round the output as `rounded_output_matmul` does. None: `matmul` is Paddle's own, or does not work in programs."""
    round_activation: Callable[[Tensor], Tensor] = round_activation
    rounded_grad_cross_entropy: Callable[[Tensor, Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]] | None = None
    """`cross_entropy` of at least one token, for plain tensors, and a function from the gradient of its output to the
    gradient of the logits, rounded as by `round_activation`; call it once. It has no gradient in Paddle's graph. None:
    `cross_entropy`, whose gradient is rounded afterwards."""
    grouped_matmul: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_matmul
    """For static programs, with a gradient; takes plain tensors. So do the two that follow."""
    dispatch_rows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = dispatch_rows
    combine_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = combine_rows
    joined_swiglu: Callable[[Tensor], Tensor] = joined_swiglu
    """For generation: a kernel has no gradient."""
    square_sum: Callable[[Sequence[Tensor], float], Tensor] = square_sum
    """For the norm of the gradients, and `scale` for gradients before an update: neither has a gradient."""
    scale: Callable[[Tensor, float], None] = scale
    adamw: Callable[..., None] | None = None
    """AdamW update of plain float32 parameters in place, from their gradients, a factor of these, their learning rates,
    [both moments, powers of both betas], the betas, epsilon and weight decays. None: Paddle's own."""
    next_logits: Callable[[DecoderWeights, Tensor, Tensor, Tensor, Tensor, Sequence[Tensor], int], Tensor] | None = None
    """One new token of each row through all layers of a decoder: embeddings [B, D], cos and sin [B, 1, 1, K / 2],
    numbers of padding columns [B], a cache buffer with free columns, [B, J, S, K] float32 or bfloat16 each, and the
    number of columns in use, to logits [B, V]. It writes keys and values, rounded as by `round_attention_input`, into
    the cache. None: layer by layer."""
    cached_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """`attention` of new tokens [B, L, H, K] to the columns of a cache, [B, J, S, K] each and possibly views, with
    spans [B, 3, L] as of `document_spans`. `next_logits` is used only on devices that have both."""
    packed_matmul: Callable[[Tensor, PackedWeight], Tensor] | None = None
    """x [..., I], rounded to bfloat16, times a packed weight, [..., O] in float32. None: no packed weights."""
    packed_grouped_matmul: Callable[[Tensor, PackedWeight, Tensor], Tensor] | None = None
    """Grouped product of rows [N, I], rounded to bfloat16, with a packed stack, [N, O] in float32; counts [E] are the
    numbers of rows of each matrix. Trailing rows give zeros. None: no packed weights."""
    packed_embedding: Callable[[Tensor, PackedWeight], Tensor] | None = None
    """Columns of a packed weight by output index [...], [..., I] in float32: embeddings of tokens. None: no packed
    weights."""
    write_packed: Callable[[Tensor, PackedWeight, int, bool], None] | None = None
    """Writes values [I, n], or transposed [n, I], into a packed weight in bf16, from an output index on. None: no
    packed weights."""
    heads_first: bool = False
    """True where `attention` and the cache have keys and values as [B, J, S, K]: for generation, where transposing the
    full cache in every pass would take longer than all else."""

    @property
    def rounds_attention(self) -> bool:
        """True if `rotary` and `attention` take and return tensors that are rounded by `round_activation`, and so are
        their gradients."""
        return self.rounded_output_matmul is not None and self.round_attention_input is not round_attention_input


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal flash attention. q [B, L, H, K]; k, v [B, S, J, K] -> [B, L, H, K]. A single query sees every key, so the
    causal flag is off.

    A mask has the form of `document_ends`; tiles between documents are skipped (FlashMask, arXiv 2410.01359). Each rank
    computes its own heads (`llmsuite.devices.local_parts`); in a static program Paddle's SPMD rule shards them.
    """
    if is_split(q) and have_same_layout([q, k, v]):
        mask = (
            None if mask is None else local_constant(mask)
        )  # `recompute` of Paddle 3.3.1 makes it a distributed tensor
        return on_local_shards(lambda q, k, v: flash_attention(q, k, v, mask), q, k, v)
    if mask is not None:
        assert mask.dtype == paddle.int32, "flash attention takes causality as a flag, not as a mask"
        if mask.shape[0] != q.shape[0]:  # the mask of a window alone has one row for all
            mask = mask.expand([q.shape[0], *mask.shape[1:]])
        return F.flashmask_attention(q, k, v, mask, causal=True)
    output, _ = F.flash_attention.flash_attention(q, k, v, causal=q.shape[1] > 1)
    return output


def document_ends(document_starts: Tensor, dtype: Any, window: int | None = None) -> Tensor:
    """`document_mask` in the form of flash attention, [B, 1, L, 1] int32: for each key the first query that does not
    see it, where the key's document ends or the key leaves the window.

    All parts of a document that continue its first tokens (`document_spans`) have to continue the same number of them,
    as after a prefix. With a window there must be no such parts: some queries between those that see a key would not
    see it, which this form cannot express.
    """
    length = document_starts.shape[1]
    at = paddle.arange(length, dtype=document_starts.dtype).expand_as(document_starts)
    _, end, own = document_spans(document_starts).unbind(1)
    # marked padding continues no document
    is_new = paddle.logical_or(document_starts == at, paddle.logical_and(document_starts <= 0, own == at))
    part_ends = _next_begins(own == at, at)
    document_ends = _next_begins(is_new, at)
    last_part = paddle.take_along_axis(end, document_ends - 1, 1)  # the number of tokens that each part continues
    ends = paddle.where(at < last_part, document_ends, part_ends)
    if window is not None:
        ends = paddle.minimum(ends, at + window)
    return ends.astype("int32").unsqueeze([1, 3])


def _next_begins(is_begin: Tensor, at: Tensor) -> Tensor:
    """For each index of a row the next later index where `is_begin`; the length where there is none."""
    length = paddle.full_like(at[:, :1], at.shape[1])
    begins = paddle.where(is_begin, at, length.expand_as(at))
    following = paddle.concat([begins[:, 1:], length], 1)
    return paddle.cummin(following.flip(1), 1)[0].flip(1)


def no_mask(num_queries: int, num_keys: int, dtype: Any, window: int | None = None) -> Tensor | None:
    """Mask of causal attention kernels, which need as many queries as keys, or one query: None, or with a window the
    form of `document_ends`, [1, 1, L, 1]. A single query is not supported with a window: flash attention would let it
    see all keys."""
    assert num_queries in (1, num_keys), "chunked prefill is not supported with flash attention"
    if window is None:
        return None
    assert num_queries == num_keys, "a single query has no window with flash attention"
    return (paddle.arange(num_keys, dtype="int32") + window).clip(max=num_keys).reshape([1, 1, -1, 1])


def fused_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary` in one kernel, which needs cos and sin for both halves."""
    cos, sin = (paddle.concat([t, t], axis=-1) for t in (cos, sin))
    shape = x.shape
    if cos.shape[0] > 1:  # the kernel has one rotation for all rows: join them to one row
        x, cos, sin = (t.reshape([1, -1, *t.shape[2:]]) for t in (x, cos, sin))
    rotated, _, _ = paddle.incubate.nn.functional.fused_rotary_position_embedding(
        x, None, None, sin=sin, cos=cos, use_neox_rotary_style=False
    )
    return rotated.reshape(shape)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one kernel, on local shards, as Paddle 3.3.1 has no SPMD rule for it."""
    if not x.is_dist():
        return F.rms_norm(x, [x.shape[-1]], weight, eps)[0]
    if not is_split(x):
        return rms_norm(x, weight, eps)
    return on_local_rows(lambda rows, gain: F.rms_norm(rows, [rows.shape[-1]], gain, eps)[0], x, weight)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` in one kernel."""
    return F.swiglu(gate, up)
