"""Pruning of a program to the operations of one rank of a pipeline.

Every rank builds the program of the full model and removes the operations of other stages. Paddle 3.3.1 knows no stage
of operations on plain tensors, between `dtensor_to_local` and `dtensor_from_local`: it removes each
`dtensor_from_local` of another stage with all operations between it and the last `dtensor_to_local` before it, whatever
they are. That is right for one group of inputs and one output. The gates of experts have more of both, so some
operations would stay without their inputs, and others would be removed that belong to this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paddle.distributed.auto_parallel.static.pir_pass import RemovePasses

from llmsuite.parallel import collective


@contextlib.contextmanager
def prune_by_use() -> Iterator[None]:
    """While active, an operation on plain tensors stays on the ranks that use its result."""
    before = RemovePasses.remove_other_rank_op_pass

    def remove(program: Any) -> None:
        _remove(program)
        before(program)

    RemovePasses.remove_other_rank_op_pass = staticmethod(remove)
    try:
        yield
    finally:
        RemovePasses.remove_other_rank_op_pass = staticmethod(before)


def _remove(program: Any) -> None:
    """Remove the operations of other ranks, and those that only they use. It starts at the end of the program, so no
    operation is in use when it is removed."""
    rank = collective.rank()
    for op in reversed(program.global_block().ops):
        if op.dist_attr:
            is_elsewhere = rank not in op.dist_attr.process_mesh.process_ids
        else:
            is_elsewhere = op.num_results() > 0 and all(value.use_empty() for value in op.results())
        if is_elsewhere:
            op.erase()
