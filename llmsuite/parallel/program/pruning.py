"""Which operations of a program are left to a rank of a pipeline.

Every rank makes the program of the whole model and takes out of it what other stages compute. Of an operation on plain
tensors, between `dtensor_to_local` and `dtensor_from_local`, Paddle 3.3.1 knows no stage: it takes each
`dtensor_from_local` of another stage out with all operations between it and the last `dtensor_to_local` in front of
it, whatever they are. That fits one group of inputs and one output. The gates of experts have more of both, so some
operations would stay without their inputs, and others go that belong here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from paddle.distributed.auto_parallel.static.pir_pass import RemovePasses

from llmsuite.parallel import collective


@contextlib.contextmanager
def by_use() -> Iterator[None]:
    """While active, an operation on plain tensors is left to the ranks that use what it makes."""
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
    """Remove what other ranks compute, and what only they use, from behind: nothing is in use when it goes."""
    rank = collective.rank()
    for op in reversed(program.global_block().ops):
        if op.dist_attr:
            is_elsewhere = rank not in op.dist_attr.process_mesh.process_ids
        else:
            is_elsewhere = op.num_results() > 0 and all(value.use_empty() for value in op.results())
        if is_elsewhere:
            op.erase()
