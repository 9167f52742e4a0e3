"""Assignment of the operations of an interleaved program to the chunks of their stage.

Paddle 3.3.1 alone cuts after layers of one class, which must start with operations on their mesh and be split evenly
over the stages; it knows no chunk of constants, local operations and their gradients. Here operations carry the name of
the part that they belong to, and an operation without a name belongs to the chunk of the operation before it.
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
_SEND = "pd_op.send_v2"
_RECEIVE = "pd_op.recv_v2"
_SUM_OVER_RANKS = "pd_op.all_reduce"
_COMBINE = "builtin.combine"
"""Joins several values into one argument of the next operation, such as a sum."""


def of_part(number: int) -> Any:
    """Context in which new operations are named after a part of the layers."""
    return name_struct(f"{_NAME}{number}")


@contextlib.contextmanager
def chunk_by_part(num_stages: int) -> Iterator[None]:
    """While active, interleaved programs have a chunk for each part on a stage."""
    before = engine.complete_chunk_id, engine.check_chunk_id, engine.pipeline_pass

    def name(program: Any, startup_program: Any, strategy: Any) -> None:
        _name(program, num_stages)

    def complete_and_schedule(programs: Any, *others: Any) -> Any:
        for program in programs:
            _complete(program)  # operations on plain tensors have lost their chunks
        return before[2](programs, *others)

    engine.complete_chunk_id = name
    engine.check_chunk_id = _complete
    engine.pipeline_pass = complete_and_schedule
    try:
        yield
    finally:
        engine.complete_chunk_id, engine.check_chunk_id, engine.pipeline_pass = before


def _name(program: Any, num_stages: int) -> None:
    """Set the chunks of a forward pass. Operations between two parts belong to the earlier part, embedding and loss to
    the first and the last."""
    chunk = 0
    for op in program.global_block().ops:
        found = re.search(rf"/{_NAME}(\d+)/", op.attrs().get("struct_name", ""))
        chunk = chunk if found is None else int(found[1]) // num_stages
        if op.dist_attr:
            _set(op, chunk)


def _complete(program: Any) -> None:
    """Set the missing chunks in a forward and backward pass: that of the previous operation, and for joined arguments
    that of the operation that takes them. Also set the chunks of messages, so that both stages send and receive in the
    same order: a send belongs to the operation before it, a receive (or a receive with a sum) to the one after it."""
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
