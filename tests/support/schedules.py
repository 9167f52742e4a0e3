"""Plays pipeline schedules through as the ranks do, without a device."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmsuite.parallel import edges
from llmsuite.parallel.schedule import Action, Kind, order


def peak_live(kind: Kind, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[int]:
    """The most passes each rank holds at once for their backward pass; see `play`."""
    return play([order(kind, s, num_stages, num_micro_batches, num_chunks) for s in range(num_stages)], num_chunks)


def play(orders: Sequence[Sequence[Action]], num_chunks: int = 1) -> list[int]:
    """Play a schedule through as the ranks do: sends do not wait, receives do, and take what was sent first.

    Args:
        orders: the passes of each rank.
        num_chunks: chunks of a rank.

    Returns:
        The most passes each rank holds at once for their backward pass.

    Raises:
        AssertionError: the ranks wait for each other for ever, or a rank gets another message than it is waiting for.
    """
    num_stages = len(orders)
    num_parts = len(orders) * num_chunks
    queues = [collections.deque(actions) for actions in orders]
    # what is under way, by receiver and direction, as `edges.Channel`
    channels: dict[tuple[int, bool], collections.deque[tuple[int, int]]] = collections.defaultdict(collections.deque)
    held: list[set[tuple[int, int]]] = [set() for _ in orders]
    peak = [0] * num_stages
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                action = queue[0]
                part = action.chunk * num_stages + stage
                if edges.source(part, num_parts, action.forward) is not None:
                    channel = channels[stage, action.forward]
                    if not channel:
                        break
                    found = channel.popleft()
                    wanted = (part, action.micro_batch)
                    assert found == wanted, f"rank {stage} waits for (part, micro-batch) {wanted} and gets {found}"
                if (receiver := edges.target(part, num_parts, action.forward)) is not None:
                    channels[receiver % num_stages, action.forward].append((receiver, action.micro_batch))
                pass_ = action.chunk, action.micro_batch
                if action.forward:
                    held[stage].add(pass_)
                else:
                    assert pass_ in held[stage], f"rank {stage} goes back over {pass_} before it went forward"
                    held[stage].remove(pass_)
                peak[stage] = max(peak[stage], len(held[stage]))
                queue.popleft()
                moved = True
        assert moved, f"the {num_stages} ranks wait for each other for ever: {[q[0] for q in queues if q]}"
    return peak


def play_connecting(
    orders: Sequence[Sequence[Action]], num_chunks: int = 1, opened_first: Sequence[edges.Channel] = ()
) -> None:
    """Play a schedule through over channels whose first use, a send too, waits until both ends are there.

    So it is with NCCL, which makes a communicator for a pair of ranks when they first talk to each other.

    Args:
        orders: the passes of each rank.
        num_chunks: chunks of a rank.
        opened_first: channels that both ends use once before the first pass, in this order.

    Raises:
        AssertionError: the ranks wait for each other for ever.
    """
    line = list(range(len(orders)))
    programs = [
        collections.deque((channel.sender == rank, channel) for channel in opened_first if rank in channel[:2])
        for rank in line
    ]
    for rank, actions in enumerate(orders):
        for action in actions:
            part = action.chunk * len(line) + rank
            num_parts = len(line) * num_chunks
            if edges.source(part, num_parts, action.forward) is not None:
                programs[rank].append((False, edges.incoming(line, rank, action.forward)))
            if edges.target(part, num_parts, action.forward) is not None:
                programs[rank].append((True, edges.outgoing(line, rank, action.forward)))
    connected = set[edges.Channel]()
    under_way = collections.Counter[edges.Channel]()
    while any(programs):
        moved = False
        for program in programs:
            while program:
                sends, channel = program[0]
                if channel not in connected:
                    other = programs[channel.receiver if sends else channel.sender]
                    if not other or other[0] != (not sends, channel):
                        break
                    connected.add(channel)
                if not sends and not under_way[channel]:
                    break
                under_way[channel] += 1 if sends else -1
                program.popleft()
                moved = True
        assert moved, f"the {len(line)} ranks wait for each other for ever: {[p[0] for p in programs if p]}"


def play_reading(orders: Sequence[Sequence[Action]], num_chunks: int, waits_for_sends: bool) -> None:
    """Play a schedule through on devices whose host reads a header and copies inputs in each forward pass.

    Sends and receives of a channel are over together, and not before the receives that the rank has enqueued earlier.
    A copy between host and device waits for these receives too.

    Args:
        orders: the passes of each rank.
        num_chunks: chunks of a rank.
        waits_for_sends: True where a copy waits for all streams of the device, and so for sends that are under way.

    Raises:
        AssertionError: the ranks wait for each other for ever.
    """
    line = list(range(len(orders)))
    programs = [
        collections.deque(step for action in actions for step in _reading_pass(line, rank, action, num_chunks))
        for rank, actions in enumerate(orders)
    ]
    enqueued: list[list[_Transfer]] = [[] for _ in line]  # of each rank, those that are not over
    while any(programs) or any(enqueued):
        moved = False
        for rank, program in enumerate(programs):
            while program:
                if program[0] is None:
                    if any(waits_for_sends or not transfer.sends for transfer in enqueued[rank]):
                        break
                else:
                    enqueued[rank].append(program[0])
                program.popleft()
                moved = True
        for mine in enqueued:
            for transfer in list(mine):
                theirs = enqueued[transfer.channel.receiver]
                if transfer.sends and _may_begin(mine, transfer):
                    same = [other for other in theirs if other.channel == transfer.channel and not other.sends]
                    if same and _may_begin(theirs, same[0]):
                        mine.remove(transfer)
                        theirs.remove(same[0])
                        moved = True
        assert moved, f"the {len(line)} ranks wait for each other for ever: {enqueued}"


class _Transfer(NamedTuple):
    channel: edges.Channel
    sends: bool


def _reading_pass(line: Sequence[int], rank: int, action: Action, num_chunks: int) -> Iterator[_Transfer | None]:
    """What the host of a rank does in a pass; None for a copy between host and device."""
    part = action.chunk * len(line) + rank
    num_parts = len(line) * num_chunks
    if edges.source(part, num_parts, action.forward) is not None:
        receive = _Transfer(edges.incoming(line, rank, action.forward), sends=False)
        if action.forward:
            yield from (receive, None)  # the header, which is read
        yield receive
    if action.forward:
        yield None  # ids or tables
    if edges.target(part, num_parts, action.forward) is not None:
        send = _Transfer(edges.outgoing(line, rank, action.forward), sends=True)
        if action.forward:
            yield from (None, send)  # the header, which is made on the host
        yield send


def _may_begin(enqueued: Sequence[_Transfer], transfer: _Transfer) -> bool:
    """True if all that a rank has enqueued before on this channel is over, and all that it receives before."""
    index = next(index for index, other in enumerate(enqueued) if other is transfer)
    return all(other.sends and other.channel != transfer.channel for other in enqueued[:index])


def play_streams(plans: Sequence[Sequence[tuple[str, int]]], num_chunks: int, one_stream: bool) -> None:
    """Play the jobs of Paddle's plans of a static pipeline through, as a device does: the host only enqueues, each
    stream computes in order, and a send is not over before its receive.

    Args:
        plans: jobs and micro-batches of each rank. Names of jobs end with the chunk if there are several.
        num_chunks: chunks of a rank.
        one_stream: True where all sends and receives of a rank are on one stream, as with 1F1B; False where sends to
            each rank have a stream, and all receives another.

    Raises:
        AssertionError: the ranks wait for each other for ever, or a rank gets another message than it is waiting for.
    """
    num_stages = len(plans)
    streams: list[dict[object, collections.deque[_Operation]]] = []
    for stage, plan in enumerate(plans):
        mine: dict[object, collections.deque[_Operation]] = collections.defaultdict(collections.deque)
        for operation in _operations(plan, stage, num_stages, num_chunks):
            kind = "compute" if operation.other is None else "messages"
            if kind == "messages" and not one_stream:
                kind = f"send to {operation.other}" if operation.sends else "receive"
            mine[kind].append(operation)
        streams.append(mine)
    done = [set[_Operation]() for _ in plans]

    def begun(stage: int) -> list[_Operation]:
        """The first operations of the streams whose inputs are there."""
        heads = [stream[0] for stream in streams[stage].values() if stream]
        return [head for head in heads if head.needs is None or head.needs in done[stage]]

    def finish(stage: int, operation: _Operation) -> None:
        next(stream for stream in streams[stage].values() if stream and stream[0] == operation).popleft()
        done[stage].add(operation)

    while any(stream for mine in streams for stream in mine.values()):
        moved = False
        for stage in range(num_stages):
            for operation in begun(stage):
                if operation.other is None:
                    finish(stage, operation)
                    moved = True
                elif operation.sends:
                    waiting = [o for o in begun(operation.other) if o.other == stage and not o.sends]
                    for receive in waiting:
                        assert receive.message == operation.message, f"{receive} gets what {operation} sends"
                        finish(stage, operation)
                        finish(operation.other, receive)
                        moved = True
        assert moved, f"the {num_stages} ranks wait for each other for ever: {[begun(s) for s in range(num_stages)]}"


class _Operation(NamedTuple):
    """An operation of a job: a computation, or a message to or from another rank."""

    message: tuple[bool, int, int]
    """Direction, part that computes or receives it, and micro-batch."""
    other: int | None = None
    """Rank at the other end of a message; None for a computation."""
    sends: bool = False
    needs: Any = None
    """The operation of this rank whose result it uses."""


def _operations(plan: Sequence[tuple[str, int]], stage: int, num_stages: int, num_chunks: int) -> Iterator[_Operation]:
    """The operations of a plan, in the order in which the host enqueues them."""
    num_parts = num_stages * num_chunks
    for job, micro_batch in plan:
        name = job.rstrip("0123456789")
        forward = name.endswith("forward")
        part = int(job.removeprefix(name) or 0) * num_stages + stage
        passed = (forward, part, micro_batch)
        source = edges.source(part, num_parts, forward)
        target = edges.target(part, num_parts, forward)
        receive = None if source is None else _Operation(passed, source % num_stages)
        compute = _Operation(passed, needs=receive)
        # the jobs of a forward pass are "recv_forward", "forward", those of a backward pass "backward",
        # "send_backward": the message of the other end is a part of the pass itself
        if receive is not None and name in ("recv_forward", "backward"):
            yield receive
        if name in ("forward", "backward"):
            yield compute
        if target is not None and name in ("forward", "send_backward"):
            yield _Operation((forward, target, micro_batch), target % num_stages, sends=True, needs=compute)
