"""Which operations of a program a rank of a pipeline keeps; programs themselves are in `tests/multi`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paddle.distributed.auto_parallel.static.pir_pass import RemovePasses

from llmsuite.parallel.program.pruning import prune_by_use

HERE = [0]
THERE = [1]
"""Ranks of two stages; tests run on rank 0."""


class Operation:
    """Stand-in for a Paddle operation."""

    def __init__(self, *inputs: Operation, ranks: list[int] | None = None, has_result: bool = True):
        self.dist_attr = None if ranks is None else SimpleNamespace(process_mesh=SimpleNamespace(process_ids=ranks))
        self._inputs = inputs
        self._num_results = int(has_result)
        self.num_uses = 0
        self.is_erased = False
        for op in inputs:
            op.num_uses += 1

    def num_results(self) -> int:
        return self._num_results

    def results(self) -> list[Any]:
        return [SimpleNamespace(use_empty=lambda: self.num_uses == 0)] * self._num_results

    def erase(self) -> None:
        assert self.num_uses == 0, "Paddle ends the process"
        for op in self._inputs:
            op.num_uses -= 1
        self.is_erased = True


def _left(*ops: Operation) -> list[int]:
    """Numbers of the operations that are left; Paddle's own pass, which runs afterwards, is replaced here."""
    program: Any = SimpleNamespace(global_block=lambda: SimpleNamespace(ops=list(ops)))
    before = RemovePasses.remove_other_rank_op_pass
    RemovePasses.remove_other_rank_op_pass = lambda program: None
    try:
        with prune_by_use():
            RemovePasses.remove_other_rank_op_pass(program)
    finally:
        RemovePasses.remove_other_rank_op_pass = staticmethod(before)
    return [i for i, op in enumerate(ops) if not op.is_erased]


def test_local_operations_are_left_where_they_are_used() -> None:
    """With two inputs, operations between them, and two outputs, as in a gate of experts."""
    for ranks, left in ((HERE, [0, 1, 2, 3, 4, 5]), (THERE, [])):
        first = Operation(ranks=ranks)
        chosen = Operation(first)
        second = Operation(ranks=ranks)
        loads = Operation(chosen, second)
        assert (
            _left(first, chosen, second, loads, Operation(chosen, ranks=ranks), Operation(loads, ranks=ranks)) == left
        )


def test_what_stands_between_local_operations_of_another_stage_stays() -> None:
    taken = Operation(ranks=THERE)
    own = Operation(ranks=HERE)
    local = Operation(taken)
    assert _left(taken, own, local, Operation(local, ranks=THERE), Operation(own, ranks=HERE)) == [1, 4]


def test_what_has_no_result_is_left_to_paddle() -> None:
    made = Operation(ranks=HERE)
    assert _left(made, Operation(made, has_result=False)) == [0, 1]


def test_paddle_is_as_before() -> None:
    before = RemovePasses.remove_other_rank_op_pass
    with prune_by_use():
        assert RemovePasses.remove_other_rank_op_pass is not before
    assert RemovePasses.remove_other_rank_op_pass is before
