"""The ranks of this run, and the collectives between them.

Until `start` the process is a run of one rank. `start` may be called again for another run, with other degrees of the
same ranks.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.static.process_group import new_process_group

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.devices.variables import LOCAL_RANK, NUM_RANKS, RANK, check_addresses, number_in
from llmsuite.launch import calls
from llmsuite.parallel.mesh import RUN, Mesh
from llmsuite.parallel.others import OtherRanks

Number = Any
"""A float, or a scalar tensor on the device that has not been copied to the host yet."""
_NOTHING = types.SimpleNamespace(shape=(), dtype="")
_LENGTH_BYTES = 8
_SHORT = 2040
_mesh = Mesh(Degrees(1, 1, 1, 1), 0)  # alone, until `start`
_others = OtherRanks()


def rank() -> int:
    """Rank of this process in the run, from 0."""
    return number_in(os.environ, RANK, 0)


def local_rank() -> int:
    """Rank of this process on its machine, from 0."""
    return number_in(os.environ, LOCAL_RANK, 0)


def num_ranks() -> int:
    """Number of processes of the run."""
    return number_in(os.environ, NUM_RANKS, 1)


def mesh() -> Mesh:
    """The mesh of this run, with this rank's coordinates in it."""
    return _mesh


def others() -> OtherRanks:
    """The numbers that the other ranks send."""
    return _others


@contextlib.contextmanager
def without_others(given: OtherRanks) -> Iterator[None]:
    """While active, this rank runs without the others: `given` has the numbers that they would send."""
    global _others
    before = _others
    _others = given
    try:
        yield
    finally:
        _others = before


def start(degrees: Degrees) -> Mesh:
    """Connect to the other ranks and make the groups of the mesh.

    Raises:
        UserError: the degrees need another number of ranks than this process was started with.
    """
    global _mesh
    if degrees.num_ranks != num_ranks():
        raise UserError(
            f"the recipe makes {degrees.num_ranks} ranks ({degrees}), and this process was started as one of "
            f"{num_ranks()}; start as many, or unset PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM to start it alone"
        )
    if num_ranks() > 1 and not dist.is_initialized():
        others = check_addresses()
        if calls.ENVIRONMENT not in os.environ:  # stale variables of a shell would make it wait in silence
            waiting = f"rank {rank()} of {num_ranks()}, by {RANK} and {NUM_RANKS}, waits for the others at {others}"
            print(f"{waiting}; unset both to start it alone", file=sys.stderr, flush=True)
        with contextlib.redirect_stderr(io.StringIO()):  # Paddle 3.3.1 lists flags here that were not set
            dist.init_parallel_env()
    calls.start(__file__)  # nothing, where no launcher waits for it
    _mesh = Mesh(degrees, rank())
    _mesh.make_groups()
    return _mesh


def make_ring(number: int, ranks: Sequence[int]) -> None:
    """Make a group that compiled programs name by a number of their own. Every rank of the run calls it for every
    group.

    Args:
        number: 0 for the group of all ranks, which Gloo has from the start.
        ranks: of the group.
    """
    # making a group is a collective over the run: all ranks make all groups in one order, members or not
    if number:
        new_process_group([int(rank) for rank in ranks], group_id=number, force_new_group=True).instantiate()
    elif (backend := dist.get_backend()) != "GLOO":
        dist.collective._init_parallel_env(backend.lower())


def barrier() -> None:
    """Wait until every rank has reached this call."""
    if num_ranks() > 1:
        # over all ranks: what is guarded, such as files of a checkpoint, concerns every rank
        with calls.recorded("barrier", _NOTHING, None):
            dist.barrier()


def read(numbers: Tensor) -> list[float]:
    """Copy a tensor [N] to the host. Such a copy waits until the accelerator has done all its work. So a training step
    makes few of them, each of many numbers, and all of them here."""
    return [float(number) for number in array_of(numbers)]


def _is_on_device(value: Number) -> bool:
    return isinstance(value, paddle.Tensor)


def _on_device(values: Sequence[Number]) -> Tensor:
    """Numbers of the host and of the device in one float64 tensor."""
    # float64: sums of many tokens stay exact to far more digits than a metric shows, and counts stay exact to 2^53
    parts = []
    for on_device, numbers in itertools.groupby(values, _is_on_device):
        if on_device:
            parts += [number.astype("float64").reshape([1]) for number in numbers]
        else:
            parts.append(tensor_of(list(numbers), dtype="float64"))
    return parts[0] if len(parts) == 1 else paddle.concat(parts)


def sum_over_run(values: Sequence[Number]) -> list[float]:
    """Sum numbers over all ranks, in float64."""
    return _sum(values, None)


def sum_on_device(values: Sequence[Number]) -> Tensor:
    """Sum numbers over all ranks, in float64, as a tensor [N] on the device; `read` copies it to the host."""
    tensor = _on_device(values)
    # left on the device: the caller may join it with other numbers, for one copy to the host instead of two
    _reduce(tensor, None, dist.ReduceOp.SUM)
    return tensor


def max_over_run(values: Sequence[Number]) -> list[float]:
    """Maximum of each number over all ranks, in float64."""
    return _reduced(values, None, dist.ReduceOp.MAX)


def sum_over_loader_ranks(values: Sequence[Number]) -> list[float]:
    """Sum numbers over the ranks that load data (`Mesh.loads_data`), in float64; only those call it."""
    assert mesh().loads_data
    # ranks in the middle of a pipeline have no batch, so no numbers, and do not know how many the others sum
    if mesh().loaders == RUN:
        return sum_over_run(values)
    return _sum(values, mesh().loader_group)


def sum_over_data(values: Sequence[Number], of_every_loader: Sequence[float] = ()) -> list[float]:
    """Sum numbers over the data ranks, in float64; every rank that loads data calls it and gets the sums.

    Ranks that share a data rank, as those of a tensor parallel group do, are counted once. The numbers in
    `of_every_loader` are summed over all ranks that load data; their sums come last.
    """
    # ranks with the same samples have the same numbers: all but one of them add zeros
    mine = values if mesh().counts_losses else [0.0] * len(values)
    return sum_over_loader_ranks([*mine, *of_every_loader])


def sum_array_over_loader_ranks(values: np.ndarray) -> np.ndarray:
    """Sum float64 arrays of one shape over the ranks that load data (`Mesh.loads_data`); only those call it."""
    assert mesh().loads_data
    if num_ranks() == 1 or not values.size:
        return values
    tensor = tensor_of(values, dtype="float64")
    # None is the default group of all ranks: without middle stages all ranks load data
    group = mesh().loader_group if mesh().has_middle_stages else None
    _reduce(tensor, group, dist.ReduceOp.SUM)
    return _others.sum_of_arrays(values, array_of(tensor))


def broadcast_from_rank0(values: Sequence[float]) -> list[float]:
    """Broadcast the numbers of rank 0 to every rank. The other ranks pass as many numbers, of any value.

    It is a sum in which all ranks but 0 add zeros. The sum already takes numbers of the host and of the device, and
    its float64 result is exact, since x + 0 = x.
    """
    found = sum_over_run(values if rank() == 0 else [0.0] * len(values))
    return _others.numbers_of_rank0(values, found)


def all_gather_floats(values: Sequence[float]) -> list[list[float]]:
    """Gather the numbers of every rank, in the order of the ranks. All ranks pass equally many.

    It is a sum in which each rank has its numbers in its own slots and zeros in the others, in one call.
    """
    count = len(values)
    own = [0.0] * (len(values) * num_ranks())
    own[rank() * count : (rank() + 1) * count] = values
    whole = sum_over_run(own)
    return [whole[i : i + count] for i in range(0, len(whole), count)]


def broadcast_bytes(source: int, size: int, data: bytes | None) -> bytes:
    """Broadcast `size` bytes of rank `source` to every rank; all ranks call it. `data` is None on the other ranks."""
    if num_ranks() == 1:
        assert data is not None
        return data
    values = np.zeros(size, "uint8") if data is None else np.frombuffer(data, "uint8")
    tensor = tensor_of(values)
    # a broadcast, not a sum as in `broadcast_from_rank0`: the data may be large, and it is sent in one direction only
    with calls.recorded("broadcast", tensor, None):
        dist.broadcast(tensor, source)
    return bytes(array_of(tensor).data)


def broadcast_message(data: bytes | None) -> bytes:
    """Broadcast bytes of rank 0 to every rank. `data` is None on the other ranks, which do not know the size.

    The first call has a fixed size, with the length and the first bytes; only a longer message needs a second call.
    """
    head = None
    if data is not None:
        head = (len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_SHORT]).ljust(_LENGTH_BYTES + _SHORT, b"\0")
    head = broadcast_bytes(0, _LENGTH_BYTES + _SHORT, head)
    size = int.from_bytes(head[:_LENGTH_BYTES], "little")
    found = head[_LENGTH_BYTES : _LENGTH_BYTES + size]
    if size > _SHORT:
        found += broadcast_bytes(0, size - _SHORT, None if data is None else data[_SHORT:])
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
        # a group of None is here the default group, of all ranks
        with calls.recorded("all_reduce", tensor, group):
            dist.all_reduce(tensor, op=kind, group=group)


def sum_in_group(tensor: Tensor, group: Any) -> None:
    """Sum a tensor over a group, in place. A group of None has one member, so nothing is sent."""
    if group is not None:
        # synchronous: the caller uses the sum in its next operation
        with calls.recorded("all_reduce", tensor, group):
            dist.all_reduce(tensor, group=group)


def max_in_group(tensor: Tensor, group: Any) -> None:
    """Take the element-wise maxima of a tensor over a group, in place. A group of None has one member, so nothing is
    sent."""
    if group is not None:
        _reduce(tensor, group, dist.ReduceOp.MAX)


class _AsyncCollective:
    """A collective that runs while this rank computes. Waiting for it is recorded as a call of its own: the rank does
    no work meanwhile, and may hang there."""

    def __init__(self, task: Any, what: str, tensor: Tensor, group: Any):
        self._task = task
        self._what = f"wait for {what}"
        self._group = group
        self._of = types.SimpleNamespace(shape=tensor.shape, dtype=tensor.dtype)  # the memory is the caller's to free

    def wait(self) -> None:
        """Return when the call is done, or when the device stream is made to wait for it."""
        with calls.recorded(self._what, self._of, self._group):
            self._task.wait()


def start_all_reduce(tensor: Tensor, group: Any) -> Any:
    """Start an asynchronous `sum_in_group`; over Gloo it is done on return.

    Returns:
        A task to `wait()` for before the tensor is used or freed; None where there is nothing to wait for.
    """
    if group is None:
        return None
    # asynchronous, so that the backward pass computes while NCCL or BKCL sends
    with calls.recorded("all_reduce", tensor, group):
        task = dist.all_reduce(tensor, group=group, sync_op=False)
    return task if dist.get_backend(group) == "GLOO" else _AsyncCollective(task, "all_reduce", tensor, group)


def start_reduce_scatter(flat: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Start a reduce-scatter of a flat tensor over a group; each rank gets its part, in the order of the group.

    Returns:
        The part, and a task to `wait()` for before it is used or `flat` freed; None where there is nothing to wait for.
    """
    if group is None:
        return flat, None
    size = flat.shape[0] // group.nranks
    with calls.recorded("reduce_scatter", flat, group):
        if dist.get_backend(group) == "GLOO":  # has no reduce-scatter: sum everything and keep this rank's part
            dist.all_reduce(flat, group=group)
            return flat[group.rank * size : (group.rank + 1) * size].clone(), None
        part = paddle.empty([size], dtype=flat.dtype)
        task = dist.reduce_scatter(part, flat, group=group, sync_op=False)
    return part, _AsyncCollective(task, "reduce_scatter", flat, group)


def broadcast_from_stage(
    value: Tensor | None, shape: Sequence[int], dtype: Any, stage: int, group: Any = None
) -> Tensor:
    """Broadcast a tensor of one pipeline stage to all stages, or to the ranks of `group`. `value` is None on the other
    stages, which need shape and dtype to make room for it."""
    if mesh().degrees.pp == 1:
        assert value is not None
        return value
    group = group or mesh().pipeline_group
    tensor = paddle.empty(list(shape), dtype=dtype) if value is None else value.contiguous()
    # within each pipeline: its ranks share data rank and tensor parallel coordinate, so they need the same values
    with calls.recorded("broadcast", tensor, group):
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
    with calls.recorded("all_to_all", rows, group, same=False):
        return _all_to_all(rows, sent, received, group)


def all_to_all_bytes(data: bytes, sent: Sequence[int], received: Sequence[int], group: Any) -> bytes:
    """`all_to_all` of bytes: `sent` and `received` are the numbers of bytes to and from each rank of the group, and
    `data` holds what is sent, in the order of the ranks."""
    rows = tensor_of(np.frombuffer(data, "uint8").reshape(-1, 1))
    return array_of(all_to_all(rows, sent, received, group)).tobytes()


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    if dist.get_backend(group) != "GLOO":
        result = paddle.empty([sum(received), rows.shape[1]], dtype=rows.dtype)
        dist.alltoall_single(result, rows, list(sent), list(received), group)
        return result
    if group.nranks % 2:
        return _by_gathering(rows, sent, group)
    # Gloo has no all-to-all, and its send waits for the receiver. So ranks exchange in pairs, the lower rank sends
    # first
    outgoing = rows.split(list(sent))
    incoming = [paddle.empty([n, rows.shape[1]], dtype=rows.dtype) for n in received]
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
    """`_all_to_all` over Gloo for an odd number of ranks, which cannot all be in pairs: the one that is left over would
    have sent and received fewer messages than the others, and Gloo matches messages by these numbers. So each rank
    gathers the rows of all ranks and takes its own."""
    # an all-gather needs equal shapes: the rows are padded to the longest, whose size every rank computes from counts
    counts = array_of(all_gather(tensor_of([list(sent)], dtype="int64"), group))  # from each rank to each
    longest = int(counts.sum(1).max())
    padded = paddle.concat([rows, paddle.zeros([longest + 1 - rows.shape[0], rows.shape[1]], rows.dtype)])
    everyone = all_gather(padded.unsqueeze(0), group)
    starts = counts[:, : group.rank].sum(1)
    return paddle.concat([everyone[of, start : start + counts[of, group.rank]] for of, start in enumerate(starts)])


def _peers(rank: int, num_ranks: int) -> list[int]:
    """All other ranks, in an order in which two ranks are each other's peer in the same round (a round-robin
    tournament, by the circle method)."""
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
    """Gather the parts of all ranks of a group and concatenate them along a dim, in the order of the group. A group of
    None has one member, whose part is the result."""
    if group is None:
        return part
    if dist.get_backend(group) == "GLOO":
        parts: list[Tensor] = []
        with calls.recorded("all_gather", part, group):
            dist.all_gather(parts, part.contiguous(), group=group)
        return paddle.concat(parts, axis=dim)
    return _joined(_gather_into_one(part, group, sync_op=True)[0], group.nranks, dim)


def start_all_gather(part: Tensor, group: Any, dim: int = 0) -> Callable[[], Tensor]:
    """Start an asynchronous `all_gather`; over Gloo it is done on return.

    Returns:
        A function that waits for the parts of the other ranks and returns the result. To be called once: until then it
        keeps the memory that is sent.
    """
    if group is None or dist.get_backend(group) == "GLOO":
        gathered = all_gather(part, group, dim)
        return lambda: gathered
    # asynchronous, so that a module computes while the parameters of the next one arrive
    arriving, sent, task = _gather_into_one(part, group, sync_op=False)
    pending = _AsyncCollective(task, "all_gather", sent, group)

    def wait(sent: Tensor = sent) -> Tensor:
        pending.wait()
        return _joined(arriving, group.nranks, dim)

    return wait


def _gather_into_one(part: Tensor, group: Any, sync_op: bool) -> tuple[Tensor, Tensor, Any]:
    """Start to gather the parts of all ranks, one after the other along dim 0. Also returns the part that is sent, and
    Paddle's task."""
    # contiguous: the backends send the memory as it lies, and a transposed view would arrive in another order
    part = part.contiguous()
    # into one tensor: to fill a list, Paddle copies what arrived three times
    gathered = paddle.empty([group.nranks * part.shape[0], *part.shape[1:]], dtype=part.dtype)
    with calls.recorded("all_gather", part, group):
        task = dist.all_gather(gathered, part, group=group, sync_op=sync_op)
    return gathered, part, task


def _joined(gathered: Tensor, num_parts: int, dim: int) -> Tensor:
    """Concatenate parts along a dim that lie one after the other along dim 0."""
    if dim == 0:
        return gathered
    return paddle.concat(gathered.chunk(num_parts), axis=dim)
