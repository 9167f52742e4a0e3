"""The ranks of this run, and the collectives between them.

Until `start` the process is alone. It may be called again for another run, with other degrees of the same ranks.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.static.process_group import new_process_group

from llmsuite.devices.variables import LOCAL_RANK, NUM_RANKS, RANK, check_addresses, number_in
from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.parallel.mesh import Mesh
from llmsuite.schema.degrees import Degrees
from llmsuite.typing import Tensor

Number = Any
"""A float, or a scalar on the device that has not been read yet."""
_NOTHING = types.SimpleNamespace(shape=(), dtype="")
_LENGTH_BYTES, _SHORT = 8, 2040
_mesh = Mesh(Degrees(1, 1, 1, 1), 0)  # alone, until `start`


def rank() -> int:
    """This process, from 0."""
    return number_in(os.environ, RANK, 0)


def local_rank() -> int:
    """This process among those of its machine, from 0."""
    return number_in(os.environ, LOCAL_RANK, 0)


def num_ranks() -> int:
    """Processes of the run."""
    return number_in(os.environ, NUM_RANKS, 1)


def mesh() -> Mesh:
    """This rank's place among the others."""
    return _mesh


def start(degrees: Degrees) -> Mesh:
    """Meet the other ranks and form the groups of the mesh."""
    global _mesh
    if degrees.num_ranks != num_ranks():
        raise UserError(
            f"the recipe makes {degrees.num_ranks} ranks ({degrees}), and this process was started as one of "
            f"{num_ranks()}; start as many, or unset PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM if nobody started it so"
        )
    if num_ranks() > 1 and not dist.is_initialized():
        others = check_addresses()
        if calls.ENVIRONMENT not in os.environ:  # variables that a shell has kept make a rank that nobody answers
            told = f"rank {rank()} of {num_ranks()}, by {RANK} and {NUM_RANKS}, waits for the others at {others}"
            print(f"{told}; unset both if nobody started it so", file=sys.stderr, flush=True)
        with contextlib.redirect_stderr(io.StringIO()):  # Paddle 3.3.1 lists flags here that nobody has set
            dist.init_parallel_env()
    calls.start(__file__)  # nothing, where no launcher waits for it
    _mesh = Mesh(degrees, rank())
    _mesh.make_groups()
    return _mesh


def make_ring(number: int, ranks: Sequence[int]) -> None:
    """Make a group that programs name by a number of their own. Every rank of the run calls it for every group.

    Args:
        number: 0 for the group of all ranks, which Gloo has from the start.
        ranks: of the group.
    """
    if number:
        new_process_group([int(rank) for rank in ranks], group_id=number, force_new_group=True).instantiate()
    elif (backend := dist.get_backend()) != "GLOO":
        dist.collective._init_parallel_env(backend.lower())


def barrier() -> None:
    """Wait until every rank is here."""
    if num_ranks() > 1:
        with calls.made("barrier", _NOTHING, None):
            dist.barrier()


def read(numbers: Tensor) -> list[float]:
    """Copy a tensor [N] to the host. Every such copy waits until an accelerator has done all its work: so a training
    step makes few of them, each of many numbers, and all of them here."""
    return [float(number) for number in numbers.numpy()]


def _is_on_device(value: Number) -> bool:
    return isinstance(value, paddle.Tensor)


def _on_device(values: Sequence[Number]) -> Tensor:
    """Numbers of the host and of the device in one float64 tensor."""
    parts = []
    for on_device, numbers in itertools.groupby(values, _is_on_device):
        if on_device:
            parts += [number.astype("float64").reshape([1]) for number in numbers]
        else:
            parts.append(paddle.to_tensor(list(numbers), dtype="float64"))
    return parts[0] if len(parts) == 1 else paddle.concat(parts)


def sum_over_run(values: Sequence[Number]) -> list[float]:
    """Add up numbers over all ranks, in float64."""
    return _sum(values, None)


def sum_on_device(values: Sequence[Number]) -> Tensor:
    """The same, left on the device: see `read`."""
    tensor = _on_device(values)
    _reduce(tensor, None, dist.ReduceOp.SUM)
    return tensor


def max_over_run(values: Sequence[Number]) -> list[float]:
    """The largest of each number over all ranks, in float64."""
    return _reduced(values, None, dist.ReduceOp.MAX)


def sum_over_readers(values: Sequence[Number]) -> list[float]:
    """Add up numbers over the ranks that read data (`Mesh.reads_data`), in float64; only those call it."""
    assert mesh().reads_data
    return _sum(values, mesh().reading_group) if mesh().has_middle else sum_over_run(values)


def sum_over_data(values: Sequence[Number], of_every_reader: Sequence[float] = ()) -> list[float]:
    """Add up numbers over the data ranks, in float64; every rank that reads data calls it and gets the sums.

    Ranks that share a data rank, as those of a tensor parallel group do, are counted once; the numbers in
    `of_every_reader`, whose sums come last, are summed over all that read.
    """
    mine = values if mesh().counts_losses else [0.0] * len(values)
    return sum_over_readers([*mine, *of_every_reader])


def sum_array_over_readers(values: np.ndarray) -> np.ndarray:
    """Add up float64 arrays of one shape over the ranks that read data (`Mesh.reads_data`); only those call it."""
    assert mesh().reads_data
    if num_ranks() == 1 or not values.size:
        return values
    tensor = paddle.to_tensor(values, dtype="float64")
    _reduce(tensor, mesh().reading_group if mesh().has_middle else None, dist.ReduceOp.SUM)
    return np.asarray(tensor.numpy())


def from_first_rank(values: Sequence[float]) -> list[float]:
    """The numbers of rank 0, on every rank; the others give as many of any value."""
    return sum_over_run(values if rank() == 0 else [0.0] * len(values))


def from_all_ranks(values: Sequence[float]) -> list[list[float]]:
    """The numbers of every rank, by rank; all give as many."""
    count, own = len(values), [0.0] * (len(values) * num_ranks())
    own[rank() * count : (rank() + 1) * count] = values
    whole = sum_over_run(own)
    return [whole[i : i + count] for i in range(0, len(whole), count)]


def bytes_of_rank(source: int, size: int, data: bytes | None) -> bytes:
    """`size` bytes that one rank has, on every rank; all of them call it. `data` is None on the others."""
    if num_ranks() == 1:
        assert data is not None
        return data
    values = np.zeros(size, "uint8") if data is None else np.frombuffer(data, "uint8")
    tensor = paddle.to_tensor(values)
    with calls.made("broadcast", tensor, None):
        dist.broadcast(tensor, source)
    return bytes(tensor.numpy().data)


def message_of_first_rank(data: bytes | None) -> bytes:
    """Some bytes that rank 0 has, on every rank; `data` is None on the others, which do not know how many. Short ones
    take one call."""
    head = None
    if data is not None:
        head = (len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_SHORT]).ljust(_LENGTH_BYTES + _SHORT, b"\0")
    head = bytes_of_rank(0, _LENGTH_BYTES + _SHORT, head)
    size = int.from_bytes(head[:_LENGTH_BYTES], "little")
    found = head[_LENGTH_BYTES : _LENGTH_BYTES + size]
    if size > _SHORT:
        found += bytes_of_rank(0, size - _SHORT, None if data is None else data[_SHORT:])
    return found


def _sum(values: Sequence[Number], group: Any) -> list[float]:
    return _reduced(values, group, dist.ReduceOp.SUM)


def _reduced(values: Sequence[Number], group: Any, kind: Any) -> list[float]:
    if num_ranks() == 1 and not any(map(_is_on_device, values)):
        return list(values)
    tensor = _on_device(values)
    _reduce(tensor, group, kind)
    return read(tensor)


def _reduce(tensor: Tensor, group: Any, kind: Any) -> None:
    if num_ranks() > 1:
        with calls.made("all_reduce", tensor, group):
            dist.all_reduce(tensor, op=kind, group=group)


def sum_in_group(tensor: Tensor, group: Any) -> None:
    """Add up a tensor over a group, in place; a group of None has one member."""
    if group is not None:
        with calls.made("all_reduce", tensor, group):
            dist.all_reduce(tensor, group=group)


class _UnderWay:
    """A call that goes on beside this rank's work. Waiting for it is recorded as a call of its own: a rank does no work
    meanwhile, and may stand there for ever."""

    def __init__(self, task: Any, what: str, tensor: Tensor, group: Any):
        self._task, self._what, self._group = task, f"wait for {what}", group
        self._of = types.SimpleNamespace(shape=tensor.shape, dtype=tensor.dtype)  # the memory is the caller's to free

    def wait(self) -> None:
        """Return when it is over, or when the device knows that what comes next has to wait."""
        with calls.made(self._what, self._of, self._group):
            self._task.wait()


def begin_sum(tensor: Tensor, group: Any) -> Any:
    """An asynchronous `sum_in_group`, where the library can; over Gloo it is done on return.

    Returns:
        A task to `wait()` for before the tensor is used or freed; None where there is nothing to wait for.
    """
    if group is None:
        return None
    with calls.made("all_reduce", tensor, group):
        task = dist.all_reduce(tensor, group=group, sync_op=False)
    return task if dist.get_backend(group) == "GLOO" else _UnderWay(task, "all_reduce", tensor, group)


def begin_reduce_scatter(flat: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Add up a flat tensor over a group; each rank gets its part, in the order of the group.

    Returns:
        The part, and a task to `wait()` for before it is used or `flat` freed; None where there is nothing to wait for.
    """
    if group is None:
        return flat, None
    size = flat.shape[0] // group.nranks
    with calls.made("reduce_scatter", flat, group):
        if dist.get_backend(group) == "GLOO":  # which has none of its own
            dist.all_reduce(flat, group=group)
            return flat[group.rank * size : (group.rank + 1) * size].clone(), None
        part = paddle.empty([size], dtype=flat.dtype)
        task = dist.reduce_scatter(part, flat, group=group, sync_op=False)
    return part, _UnderWay(task, "reduce_scatter", flat, group)


def from_stage(value: Tensor | None, shape: Sequence[int], dtype: Any, stage: int, group: Any = None) -> Tensor:
    """A tensor that one pipeline stage has, on all, or on those of a group. `value` is None on the others."""
    if mesh().degrees.pp == 1:
        assert value is not None
        return value
    group = group or mesh().pipeline_group
    tensor = paddle.empty(list(shape), dtype=dtype) if value is None else value.contiguous()
    with calls.made("broadcast", tensor, group):
        dist.broadcast(tensor, group.ranks[stage], group=group)
    return tensor


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send consecutive rows to each rank of a group, and receive theirs, in the order of the group.

    Args:
        rows: [N, D].
        sent: number of rows to each rank, N together.
        received: number of rows from each rank.
        group: of more than one rank; all of them call it.
    """
    with calls.made("all_to_all", rows, group, same=False):
        return _all_to_all(rows, sent, received, group)


def exchange_bytes(data: bytes, sent: Sequence[int], received: Sequence[int], group: Any) -> bytes:
    """`all_to_all` of bytes: so many `sent` to each rank of a group, one behind the other, so many `received`."""
    rows = paddle.to_tensor(np.frombuffer(data, "uint8").reshape(-1, 1))
    return bytes(all_to_all(rows, sent, received, group).numpy().tobytes())


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    if dist.get_backend(group) != "GLOO":
        result = paddle.empty([sum(received), rows.shape[1]], dtype=rows.dtype)
        dist.alltoall_single(result, rows, list(sent), list(received), group)
        return result
    if group.nranks % 2:
        return _by_gathering(rows, sent, group)
    # Gloo has none of its own, and its send waits for the receiver: in pairs, the lower rank sends first
    outgoing, incoming = rows.split(list(sent)), [paddle.empty([n, rows.shape[1]], dtype=rows.dtype) for n in received]
    incoming[group.rank] = outgoing[group.rank]
    nothing = paddle.zeros([1, rows.shape[1]], rows.dtype)
    for peer in _peers(group.rank, group.nranks):
        for sends in (group.rank < peer, group.rank > peer):
            # also where there are no rows: Gloo matches messages by how many were sent and received before
            if sends:
                group.process_group.send(outgoing[peer].contiguous() if sent[peer] else nothing, peer, True).wait()
            else:
                group.process_group.recv(incoming[peer] if received[peer] else nothing, peer, True).wait()
    return paddle.concat(incoming)


def _by_gathering(rows: Tensor, sent: Sequence[int], group: Any) -> Tensor:
    """The same where ranks cannot all be in pairs: whoever is left over would have sent and received less than the
    others, by which Gloo matches messages. Each gets the rows of all, and takes its own."""
    counts = all_gather(paddle.to_tensor([list(sent)], dtype="int64"), group).numpy()  # from each rank to each
    longest = int(counts.sum(1).max())
    padded = paddle.concat([rows, paddle.zeros([longest + 1 - rows.shape[0], rows.shape[1]], rows.dtype)])
    everyone = all_gather(padded.unsqueeze(0), group)
    starts = counts[:, : group.rank].sum(1)
    return paddle.concat([everyone[of, start : start + counts[of, group.rank]] for of, start in enumerate(starts)])


def _peers(rank: int, num_ranks: int) -> list[int]:
    """All others, in an order in which every rank meets the one that meets it (a round-robin tournament)."""
    size = num_ranks + num_ranks % 2
    rounds = []
    for turn in range(size - 1):
        if rank == size - 1:
            peer = turn * size // 2 % (size - 1)
        else:
            peer = (turn - rank) % (size - 1)
            peer = size - 1 if peer == rank else peer
        if peer < num_ranks:
            rounds.append(peer)
    return rounds


def all_gather(part: Tensor, group: Any, dim: int = 0) -> Tensor:
    """The parts of all ranks of a group, joined along a dim, in the order of the group."""
    if group is None:
        return part
    parts: list[Tensor] = []
    with calls.made("all_gather", part, group):
        dist.all_gather(parts, part.contiguous(), group=group)
    return paddle.concat(parts, axis=dim)
