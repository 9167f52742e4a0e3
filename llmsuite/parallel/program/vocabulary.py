"""Lookup and cross-entropy of a vocabulary that is cut over tp, inside of a whole-step program.

What they are given lies on the mesh [data, tp] of such a program; `parallel.tensor` has the forms for running op by op.

Shapes: B sequences, L length, D hidden, N tokens, V vocabulary with its padding.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

from llmsuite.typing import Tensor

_ROWS, _WHOLE, _CUT = [dist.Shard(0), dist.Replicate()], [dist.Replicate()] * 2, [dist.Replicate(), dist.Shard(0)]


class ProgramLookup(dist.LocalLayer):
    """Rows of a table: each rank looks up the ids it has, zeros elsewhere."""

    def __init__(self, input_ids: Tensor, first: int):
        """
        Args:
            input_ids: those of `look_up`.
            first: id of the first row that this rank has.
        """
        mesh = input_ids.process_mesh
        # the gradient of the rows is a sum over the data ranks
        super().__init__(
            [(mesh, [dist.Shard(1), dist.Shard(0)])], [(mesh, _ROWS), (mesh, [dist.Partial(), dist.Shard(0)])]
        )
        self._first = first

    def look_up(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """Ids [B, L] to the rows [B, L, D] of a table, in any placements over tp."""
        return self(input_ids, table).sum(0)  # of [tp, B, L, D], one part a rank

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        ids = input_ids - self._first
        mine = paddle.logical_and(ids >= 0, ids < rows.shape[0])
        found = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), rows)
        return (found * mine.astype(found.dtype).unsqueeze(-1)).unsqueeze(0)


def cross_entropy(logits: Tensor, targets: Tensor, vocabulary: int | None) -> Tensor:
    """`devices.ops.cross_entropy` of logits [N, V] that are cut along the vocabulary; those behind it are padding.

    Sums are products with ones: before the gradient of a sum over a dim that is cut, Paddle 3.3.1 brings together what
    was summed.
    """
    mesh = logits.process_mesh
    ids = paddle.arange(logits.shape[-1], dtype=targets.dtype)
    # cut as the logits: else each rank would compare with the whole vocabulary; in two steps, as Paddle 3.3.1 cannot
    # cut what an operation makes
    ids = dist.reshard(dist.shard_tensor(ids, mesh, _WHOLE), mesh, _CUT)
    if vocabulary is not None and logits.shape[-1] > vocabulary:
        logits = logits + (ids >= vocabulary).astype(logits.dtype) * -1e30
    shifted = logits - logits.detach().max(-1, keepdim=True)
    is_target = (ids == targets.unsqueeze(-1)).astype(shifted.dtype)
    nll = _sum(shifted.exp()).log() - _sum(shifted * is_target)
    return dist.reshard(nll.squeeze(-1), mesh, _ROWS)


def _sum(x: Tensor) -> Tensor:
    """[N, V] to [N, 1]."""
    return paddle.matmul(x, paddle.ones([x.shape[-1], 1], x.dtype))
