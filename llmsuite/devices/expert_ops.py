"""The way of tokens to routed experts and back in static programs, and the grouped product of the experts.

Shapes: T tokens, k experts of each, N = T k rows, E experts, I inputs and O outputs of an expert's matrix, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import paddle

from llmsuite.base.typing import Tensor


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


@dataclasses.dataclass(frozen=True)
class ExpertOps:
    """The operations of routed experts in static programs, with gradients; they take plain tensors."""

    grouped_matmul: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_matmul
    dispatch_rows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = dispatch_rows
    combine_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = combine_rows
