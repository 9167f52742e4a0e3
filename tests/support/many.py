"""All ranks of a mesh in one process: a thread each, with `paddle.distributed` replaced by a table they meet at.

One thread runs at a time, and the others only where it waits for them: Paddle's name generator is one a process.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel import collective, mesh
from llmsuite.parallel.mesh import Mesh

T = TypeVar("T")
MESHES = [
    Degrees(pp, dp, sharding, tp)
    for pp, dp, sharding, tp in (
        *((1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1)),
        *((1, 2, 3, 1), (1, 1, 2, 2), (1, 3, 1, 2), (1, 2, 2, 2), (2, 1, 2, 2), (3, 2, 1, 1), (2, 2, 2, 2)),
    )
]
EXPERT_MESHES = [
    Degrees(pp, dp, sharding, tp, ep)
    for pp, dp, sharding, tp, ep in (
        *((1, 2, 1, 1, 2), (1, 1, 2, 1, 2), (1, 4, 1, 1, 2), (1, 1, 4, 1, 2), (1, 2, 2, 1, 2), (1, 2, 2, 1, 4)),
        *((1, 3, 2, 1, 3), (1, 3, 2, 1, 6), (2, 2, 2, 2, 2), (2, 4, 1, 2, 4)),
    )
]


class Group:
    """As much of Paddle's group as the engine uses, seen from the rank that asks."""

    def __init__(self, ranks: Sequence[int], table: Table):
        self.ranks = [int(r) for r in ranks]
        self.nranks = len(ranks)
        self.table = table

    @property
    def rank(self) -> int:
        return self.ranks.index(self.table.here.rank)


class Table:
    """Where the ranks of one mesh exchange values."""

    def __init__(self, num_ranks: int):
        self.here = threading.local()
        self.baton = threading.Lock()
        self.everyone = range(num_ranks)
        self._given: dict[tuple[int, ...], dict[int, Any]] = {}
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}

    def exchange(self, value: Any, group: Group | None) -> list[Any]:
        """What every member brings, in the order of the group."""
        members = tuple(self.everyone if group is None else group.ranks)
        assert self.here.rank in members
        given = self._given.setdefault(members, {})
        barrier = self._barriers.setdefault(members, threading.Barrier(len(members), timeout=60))
        given[self.here.rank] = value
        self._wait(barrier)
        values = [given[rank] for rank in members]
        self._wait(barrier)  # before anybody brings the next one
        return values

    def _wait(self, barrier: threading.Barrier) -> None:
        self.baton.release()
        try:
            barrier.wait()
        finally:
            self.baton.acquire()

    def abort(self) -> None:
        for barrier in self._barriers.values():
            barrier.abort()


class Arrival:
    """A sum that goes on beside other work: nothing that can be used is in the tensor until it is waited for."""

    def __init__(self, tensor: Any, found: np.ndarray):
        self._tensor = tensor
        self._found = found
        tensor.copy_(paddle.full_like(tensor, float("nan")), True)

    def wait(self) -> None:
        self._tensor.copy_(paddle.to_tensor(self._found), True)


def run(degrees: Degrees, work: Callable[[Mesh], T], backend: str = "GLOO") -> list[T]:
    """Call `work` as every rank of a mesh; returns what it gives, by rank."""
    table = Table(degrees.num_ranks)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def enter(rank: int) -> None:
        table.here.rank = rank
        with table.baton:
            try:
                table.here.mesh = Mesh(degrees, rank)
                results[rank] = work(table.here.mesh)
            except BaseException as error:
                errors.append(error)
                table.abort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "dist", _distributed(table, backend))
        patch.setattr(collective, "mesh", lambda: table.here.mesh)
        patch.setattr(collective, "rank", lambda: table.here.rank)
        patch.setattr(collective, "num_ranks", lambda: degrees.num_ranks)
        patch.setattr(mesh, "_own_group", lambda rows, rank: _own_group(rows, rank, table))
        threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(degrees.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(degrees.num_ranks)]


def _own_group(rows: np.ndarray, rank: int, table: Table) -> Group | None:
    own = next((row for row in rows if rank in row), ())
    return Group(own, table) if len(own) > 1 else None


def _distributed(table: Table, backend: str) -> types.SimpleNamespace:
    """What the engine uses of `paddle.distributed`."""

    def add_up(tensor: Any, group: Group | None) -> np.ndarray:
        assert tensor.dtype in (paddle.float32, paddle.float64), "sums over ranks are made in full precision"
        return np.sum(table.exchange(tensor.numpy(), group), axis=0, dtype=tensor.numpy().dtype)

    def all_reduce(
        tensor: Any, op: int = dist.ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
    ) -> Arrival | None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
        largest = op == dist.ReduceOp.MAX
        found = np.max(table.exchange(tensor.numpy(), group), axis=0) if largest else add_up(tensor, group)
        if not sync_op:
            return Arrival(tensor, found)
        tensor.copy_(paddle.to_tensor(found), True)
        return None

    def all_gather(parts: Any, part: Any, group: Group | None = None, sync_op: bool = True) -> Arrival | None:
        gathered = table.exchange(part.clone(), group)
        assert len({tuple(value.shape) for value in gathered}) == 1, "as Paddle wants it"
        if isinstance(parts, list):
            parts += [value.clone() for value in gathered]
            return None
        assert backend != "GLOO"
        if not sync_op:
            return Arrival(parts, paddle.concat(gathered).numpy())
        parts.copy_(paddle.concat(gathered), True)
        return None

    def reduce_scatter(part: Any, tensor: Any, group: Group, sync_op: bool = True) -> Arrival:
        assert tensor.shape[0] == group.nranks * part.shape[0]
        assert not sync_op, "it goes on beside the backward pass"
        return Arrival(part, np.split(add_up(tensor, group), group.nranks)[group.rank])

    def alltoall_single(out: Any, tensor: Any, sent: list[int], received: list[int], group: Group) -> None:
        assert [sum(sent), sum(received)] == [tensor.shape[0], out.shape[0]]
        parts = [parts[group.rank] for parts in table.exchange(np.split(tensor.numpy(), np.cumsum(sent)[:-1]), group)]
        assert [len(part) for part in parts] == received
        out.copy_(paddle.to_tensor(np.concatenate(parts)), True)

    def broadcast(tensor: Any, source: int, group: Group | None = None) -> None:
        ranks = range(len(table.everyone)) if group is None else group.ranks
        tensor.copy_(table.exchange(tensor.clone(), group)[list(ranks).index(source)], True)

    def barrier() -> None:
        table.exchange(None, None)

    members: dict[str, Any] = {
        "broadcast": broadcast,
        "barrier": barrier,
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "get_backend": lambda group: backend,
    }
    members["ReduceOp"] = dist.ReduceOp
    if backend != "GLOO":  # which has none
        members |= {"reduce_scatter": reduce_scatter, "alltoall_single": alltoall_single}
    return types.SimpleNamespace(**members)
