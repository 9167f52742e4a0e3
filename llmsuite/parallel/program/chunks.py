"""Which chunk of its stage an operation of an interleaved program belongs to.

By itself Paddle 3.3.1 cuts behind layers of one class, which begin with operations on their mesh and lie on the stages
as evenly as can be; and of constants, local operations and their gradients it knows no chunk. Here operations know the
part of the layers that they stem from, by name, and what has no name belongs with what it stands behind.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

from paddle.base.framework import name_struct
from paddle.distributed.auto_parallel.static import engine
from paddle.distributed.auto_parallel.static.reshard_funcs.base_reshard_func import copy_op_attr_with_new_member
from paddle.distributed.fleet.meta_optimizers.common import OpRole

_NAME = "pipeline_part"
_UNKNOWN = -1
_SEND, _RECEIVE = "pd_op.send_v2", "pd_op.recv_v2"
_SUM_OVER_RANKS = "pd_op.all_reduce"
_COMBINE = "builtin.combine"
"""Makes several values the one argument of the operation behind it, such as a sum."""


def of_part(number: int) -> Any:
    """A context: operations that are made meanwhile stem from a part of the layers."""
    return name_struct(f"{_NAME}{number}")


@contextlib.contextmanager
def by_parts(num_stages: int) -> Iterator[None]:
    """While active, interleaved programs have a chunk for each part on a stage."""
    before = engine.complete_chunk_id, engine.check_chunk_id, engine.pipeline_pass

    def name(program: Any, startup_program: Any, strategy: Any) -> None:
        _name(program, num_stages)

    def complete_and_schedule(programs: Any, *others: Any) -> Any:
        for program in programs:
            _complete(program)  # what is no distributed tensor has lost its chunk
        return before[2](programs, *others)

    engine.complete_chunk_id, engine.check_chunk_id, engine.pipeline_pass = name, _complete, complete_and_schedule
    try:
        yield
    finally:
        engine.complete_chunk_id, engine.check_chunk_id, engine.pipeline_pass = before


def _name(program: Any, num_stages: int) -> None:
    """Set the chunks of a forward pass. What lies between two parts belongs to the one before, as embedding and loss do
    to the first and the last."""
    chunk = 0
    for op in program.global_block().ops:
        found = re.search(rf"/{_NAME}(\d+)/", op.attrs().get("struct_name", ""))
        chunk = chunk if found is None else int(found[1]) // num_stages
        if op.dist_attr:
            _set(op, chunk)


def _complete(program: Any) -> None:
    """Set the chunks that are missing in a forward and backward pass: those of the operation before, and of arguments
    that of the operation which takes them. And those of messages, so that both stages send and receive in one order:
    what is sent belongs with what stands before it, what is received, or received and summed, with what stands behind
    it."""
    ops = [op for op in program.global_block().ops if op.op_role != int(OpRole.Optimize)]
    names = [op.name() for op in ops]
    known = [_UNKNOWN if name == _SEND else _chunk(op) for name, op in zip(names, ops)]
    for i, pair in enumerate(itertools.pairwise(names)):
        if pair == (_RECEIVE, _SUM_OVER_RANKS):
            known[i + 1] = _UNKNOWN
    for i in reversed(range(len(ops) - 1)):
        if names[i] in (_RECEIVE, _COMBINE):
            known[i] = next((chunk for chunk in known[i + 1 :] if chunk != _UNKNOWN), _UNKNOWN)
    chunk = 0
    for op, own in zip(ops, known):
        chunk = chunk if own == _UNKNOWN else own
        _set(op, chunk)


def _chunk(op: Any) -> int:
    if op.dist_attr:
        return int(op.dist_attr.chunk_id)
    return int(op.chunk_id) if op.has_attr("chunk_id") else _UNKNOWN


def _set(op: Any, chunk: int) -> None:
    if op.dist_attr:
        op.dist_attr = copy_op_attr_with_new_member(op.dist_attr, new_chunk_id=chunk)
    else:
        op.set_int_attr("chunk_id", chunk)
