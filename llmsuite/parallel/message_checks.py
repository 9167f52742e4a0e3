"""Messages between ranks as the engine sends them, with their values checked and their bandwidth: for `llmsuite doctor
--kernels`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel import collective, schedule
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.p2p import P2PChannels

ROWS = 512
WIDTH = 1024
"""Rows and columns of a message of each rank: 2 MiB in float32."""
_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class MessageResult:
    """A kind of message in one dtype, between all ranks."""

    name: str
    dtype: str
    is_right: bool
    """True if every rank has the right values, each time."""
    seconds: float
    """Median time, of the slowest rank."""
    bytes_per_second: float
    """Bytes that a rank sends in this time."""


def check_messages(num_ranks: int, dtypes: Sequence[str]) -> list[MessageResult]:
    """Send and check all kinds of messages. Every rank calls it, after the device is set up."""
    mesh = collective.start(Degrees(pp=1, dp=num_ranks, sharding=1, tp=1))
    rank = collective.rank()
    group = mesh.data_group
    pipeline = Mesh(Degrees(num_ranks, 1, 1, 1), rank)
    channels = P2PChannels(pipeline, False)
    found = []
    for dtype in dtypes:
        for name, share, run in _kinds(num_ranks, rank, dtype, group, channels):
            right = True
            durations = []
            for _ in range(_REPEATS + 1):
                collective.barrier()
                start = time.perf_counter()
                right &= run()
                durations.append(time.perf_counter() - start)
            wrong = collective.sum_over_run([0.0 if right else 1.0])[0]
            # the first one opens connections
            seconds = collective.max_over_run([sorted(durations[1:])[_REPEATS // 2]])[0]
            size = share * ROWS * WIDTH * (4 if dtype == "float32" else 2)
            found.append(MessageResult(name, dtype, wrong == 0, seconds, size / seconds))
    return found


Kind = tuple[str, float, Callable[[], bool]]
"""Name, number of messages of full size that a rank sends, and the function that sends and checks them."""


def _kinds(num_ranks: int, rank: int, dtype: str, group: Any, channels: P2PChannels) -> Iterator[Kind]:
    ring = 2 * (num_ranks - 1) / num_ranks

    def own() -> Tensor:
        return paddle.full([ROWS, WIDTH], float(rank + 1), dtype)

    def all_reduce() -> bool:
        x = own()
        task = collective.start_all_reduce(x, group)
        if task is not None:
            task.wait()
        return _is(x, num_ranks * (num_ranks + 1) / 2)

    def reduce_scatter() -> bool:
        part, task = collective.start_reduce_scatter(own().flatten(), group)
        if task is not None:
            task.wait()
        return _is(part, num_ranks * (num_ranks + 1) / 2)

    def all_gather() -> bool:
        return _are_of_ranks(collective.all_gather(own(), group), num_ranks)

    def all_to_all() -> bool:
        rows = [ROWS // num_ranks] * num_ranks
        return _are_of_ranks(collective.all_to_all(own()[: sum(rows)], rows, rows, group), num_ranks)

    def broadcast() -> bool:
        x = own()
        dist.broadcast(x, group.ranks[-1], group=group)
        return _is(x, float(num_ranks))

    yield "all-reduce", ring, all_reduce
    yield "reduce-scatter", ring / 2, reduce_scatter
    yield "all-gather", num_ranks - 1, all_gather
    yield "all-to-all", ring / 2, all_to_all
    yield "broadcast", 1, broadcast
    count = 2 * num_ranks
    yield "pipeline, 1F1B", 2 * count, lambda: _pass_through(num_ranks, rank, count, dtype, channels)


def _pass_through(num_ranks: int, rank: int, count: int, dtype: str, channels: P2PChannels) -> bool:
    """Send activations and gradients of micro-batches through a pipeline, in the order of its schedule: each stage adds
    1 to an activation, and 1 to a gradient on the way back."""
    right = True
    for action in schedule.order("1F1B", rank, num_ranks, count):
        first = rank == 0 if action.forward else rank == num_ranks - 1
        last = rank == num_ranks - 1 if action.forward else rank == 0
        distance = rank if action.forward else num_ranks - 1 - rank
        if first:
            x = paddle.full([ROWS, WIDTH], float(action.micro_batch), dtype)
        else:
            x = channels.receive([ROWS, WIDTH], dtype, action.forward)
            right &= _is(x, float(action.micro_batch + distance))
        if not last:
            sent = x + 1.0
            channels.send(sent, action.forward)
            sent.zero_()  # a stage frees or overwrites what it has sent
    return right


def _are_of_ranks(x: Tensor, num_ranks: int) -> bool:
    """True if rows are those of all ranks, in their order: a rank sends its number, from 1."""
    return all(_is(part, number + 1.0) for number, part in enumerate(x.split(num_ranks)))


def _is(x: Tensor, value: float) -> bool:
    """True if all elements have a value; waits for them."""
    return collective.read((x == value).all().astype("float32").reshape([1])) == [1.0]
