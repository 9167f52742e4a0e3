"""Plays pipeline schedules through as the ranks do, without a device."""

from __future__ import annotations

import collections
from collections.abc import Sequence

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
