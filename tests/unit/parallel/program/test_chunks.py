"""Which chunk an operation of an interleaved program belongs to; programs themselves are in `tests/multi`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from paddle.distributed.auto_parallel.static import engine
from paddle.distributed.fleet.meta_optimizers.common import OpRole

from llmsuite.parallel.program.chunks import chunk_by_part

SEND = "pd_op.send_v2"
RECEIVE = "pd_op.recv_v2"


class Operation:
    """Stand-in for a Paddle operation on plain tensors, with the attributes of its chunk."""

    dist_attr = None

    def __init__(self, name: str, chunk: int | None = None, role: int = int(OpRole.Backward)):
        self._name = name
        self.op_role = role
        self._attributes = {} if chunk is None else {"chunk_id": chunk}

    def name(self) -> str:
        return self._name

    def has_attr(self, name: str) -> bool:
        return name in self._attributes

    def attrs(self) -> Mapping[str, int]:
        return self._attributes

    def set_int_attr(self, name: str, value: int) -> None:
        self._attributes[name] = value

    @property
    def chunk_id(self) -> int:
        return self._attributes["chunk_id"]


def _completed(*ops: Operation) -> list[int | None]:
    program: Any = SimpleNamespace(global_block=lambda: SimpleNamespace(ops=list(ops)))
    with chunk_by_part(2):
        engine.check_chunk_id(program)
    return [op.attrs().get("chunk_id") for op in ops]


def test_an_operation_without_a_chunk_gets_that_of_the_one_before() -> None:
    found = _completed(*(Operation("pd_op.scale", chunk) for chunk in (None, 1, -1, None, 0, -1)))
    assert found == [0, 1, 1, 1, 0, 0]


def test_joined_arguments_get_the_chunk_of_the_operation_that_takes_them() -> None:
    """The gradient of an input has the first chunk, and the gradient of its result comes after it."""
    take = [Operation("builtin.combine"), Operation("pd_op.add_n", 0), Operation("builtin.combine")]
    assert _completed(Operation("pd_op.slice_grad", 1), *take, Operation("pd_op.add_n", 1)) == [1, 0, 0, 1, 1]


def test_messages_get_the_chunk_of_their_pass() -> None:
    """The gradient of a tied embedding arrives at the first stage in its last chunk, and would be used in the first."""
    found = _completed(
        *(Operation("pd_op.matmul", 1), Operation(SEND, 0)),
        *(Operation(RECEIVE, 0), Operation(RECEIVE, 1), Operation("custom_op.norm_grad"), Operation("pd_op.add", 1)),
        *(Operation(SEND, 0), Operation(RECEIVE, -1), Operation("pd_op.add_grad", 0)),
    )
    assert found == [1, 1, 1, 1, 1, 1, 1, 0, 0]


def test_a_receive_with_a_sum_gets_the_chunk_of_the_operation_after_it() -> None:
    """Such as for the gradient of a tied embedding that is not sliced, with `stage3`."""
    found = _completed(
        *(Operation(SEND, 1), Operation(RECEIVE, 0), Operation("pd_op.all_reduce", 0)),
        *(Operation(RECEIVE, 1), Operation("pd_op.add_grad", 1), Operation("pd_op.all_reduce", 0)),
    )
    assert found == [0, 1, 1, 1, 1, 0]


def test_the_update_has_no_chunk() -> None:
    assert _completed(Operation("pd_op.adamw_", role=int(OpRole.Optimize))) == [None]


def test_paddle_is_as_before() -> None:
    before = engine.complete_chunk_id, engine.check_chunk_id, engine.pipeline_pass
    with chunk_by_part(2):
        assert engine.check_chunk_id is not before[1]
    assert (engine.complete_chunk_id, engine.check_chunk_id, engine.pipeline_pass) == before
