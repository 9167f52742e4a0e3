"""Lookup and cross-entropy of a vocabulary that is cut over tp, inside of a step program.

Their inputs lie on the mesh [data, tp] of such a program; `parallel.tensor` has the eager versions.

Shapes: B sequences, L length, D hidden, N tokens, V vocabulary with its padding.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor

_ROWS = [dist.Shard(0), dist.Replicate()]
_REPLICATED = [dist.Replicate()] * 2
_CUT = [dist.Replicate(), dist.Shard(0)]


class ProgramLookup(dist.LocalLayer):
    """Embedding lookup where each rank looks up the ids it has; others get zeros."""

    def __init__(self, input_ids: Tensor, first: int):
        """
        Args:
            input_ids: of the later call of `rows`.
            first: id of the first row that this rank has.
        """
        mesh = input_ids.process_mesh
        # the gradient of the rows is a sum over the data ranks
        super().__init__(
            [(mesh, [dist.Shard(1), dist.Shard(0)])], [(mesh, _ROWS), (mesh, [dist.Partial(), dist.Shard(0)])]
        )
        self._first = first

    def rows(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """Ids [B, L] to the rows [B, L, D] of a table, in any placements over tp."""
        return self(input_ids, table).sum(0)  # of [tp, B, L, D], one part a rank

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        ids = input_ids - self._first
        mine = paddle.logical_and(ids >= 0, ids < rows.shape[0])
        found = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), rows)
        return (found * mine.astype(found.dtype).unsqueeze(-1)).unsqueeze(0)


def cross_entropy(logits: Tensor, targets: Tensor, vocabulary: int | None) -> Tensor:
    """`devices.ops.cross_entropy` of logits [N, V] that are cut along the vocabulary; logits after the vocabulary are
    padding.

    Sums are products with ones: for the gradient of a sum over a dim that is cut, Paddle 3.3.1 would gather the logits.
    """
    mesh = logits.process_mesh
    ids = paddle.arange(logits.shape[-1], dtype=targets.dtype)
    # cut as the logits are: otherwise each rank would compare with the full vocabulary; in two steps, because Paddle
    # 3.3.1 cannot directly cut the result of an operation
    ids = dist.reshard(dist.shard_tensor(ids, mesh, _REPLICATED), mesh, _CUT)
    if vocabulary is not None and logits.shape[-1] > vocabulary:
        logits = logits + (ids >= vocabulary).astype(logits.dtype) * -1e30
    shifted = logits - logits.detach().max(-1, keepdim=True)
    is_target = (ids == targets.unsqueeze(-1)).astype(shifted.dtype)
    nll = _sum(shifted.exp()).log() - _sum(shifted * is_target)
    # replicated over tp: each rank of it then has the losses of the rows of its data rank
    return dist.reshard(nll.squeeze(-1), mesh, _ROWS)


def _sum(x: Tensor) -> Tensor:
    """[N, V] to [N, 1]."""
    return paddle.matmul(x, paddle.ones([x.shape[-1], 1], x.dtype))
