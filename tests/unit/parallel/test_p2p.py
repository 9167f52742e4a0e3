"""Channels between the ranks of a pipeline, over a stand-in for NCCL: threads in place of ranks, no device."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel import edges, p2p
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.schedule import order

PATIENCE = 20.0


class Task:
    """A send that is over once a while has passed."""

    def __init__(self, asked_before_done: int = 0):
        self.left = asked_before_done
        self.waits = 0

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> None:
        self.waits += 1


class Pair:
    """A group of two ranks. Its first use, from whichever side, waits until the other rank uses it too."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = list(ranks)
        self._meeting = threading.Barrier(2)
        self._sent = queue.Queue[Any]()
        self._connected = dict.fromkeys(self.ranks, False)
        self.process_group = self

    def get_group_rank(self, rank: int) -> int:
        return self.ranks.index(rank)

    def _connect(self, rank: int) -> None:
        if not self._connected[rank]:
            self._connected[rank] = True
            self._meeting.wait(PATIENCE)

    def send(self, value: Any, to: int) -> Task:
        self._connect(self.ranks[1 - self.ranks.index(to)])
        self._sent.put(value.clone())
        return Task()

    def recv(self, value: Any, number: int, sync: bool) -> Task:
        self._connect(self.ranks[1 - number])
        value.copy_(self._sent.get(timeout=PATIENCE), False)
        return Task()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], Callable[[int], p2p.P2PChannels]]:
    """Makes what starts the channels of a rank, for a number of ranks and with a ring or without."""

    def prepare(num_ranks: int, ring: bool) -> Callable[[int], p2p.P2PChannels]:
        made = list[Pair]()
        turn = threading.local()
        lock = threading.Lock()

        def new_group(ranks: Sequence[int]) -> Pair:
            turn.number = getattr(turn, "number", -1) + 1  # every rank makes all of them, in the same order
            with lock:
                if turn.number == len(made):
                    made.append(Pair(ranks))
            assert made[turn.number].ranks == list(ranks)
            return made[turn.number]

        monkeypatch.setattr(dist, "new_group", new_group)
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "NCCL")
        monkeypatch.setattr(dist, "isend", lambda value, to, group: group.send(value, to))
        return lambda rank: p2p.P2PChannels(Mesh(Degrees(num_ranks, 1, 1, 1), rank), ring)

    return prepare


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "num_chunks"), [(2, 5, 2), (2, 5, 3), (3, 4, 2), (4, 3, 1)])
def test_a_step_ends_where_connecting_waits(
    start: Callable[..., Any], num_ranks: int, num_micro_batches: int, num_chunks: int
) -> None:
    start_rank = start(num_ranks, num_chunks > 1)
    kind: Any = "interleaved" if num_chunks > 1 else "1F1B"

    def run(rank: int) -> list[float]:
        channels = start_rank(rank)
        got = list[float]()
        for action in order(kind, rank, num_ranks, num_micro_batches, num_chunks):
            part = action.chunk * num_ranks + rank
            num_parts = num_ranks * num_chunks
            if (source := edges.source(part, num_parts, action.forward)) is not None:
                found = channels.receive([1], "float32", action.forward).item()
                assert found == 100 * source + action.micro_batch
                got.append(found)
            if edges.target(part, num_parts, action.forward) is not None:
                channels.send(paddle.to_tensor([100.0 * part + action.micro_batch]), action.forward)
        return got

    with concurrent.futures.ThreadPoolExecutor(num_ranks) as pool:
        received = [each.result(4 * PATIENCE) for each in [pool.submit(run, rank) for rank in range(num_ranks)]]
    # each part but the first receives activations, each but the last gradients
    assert sum(map(len, received)) == 2 * num_micro_batches * (num_ranks * num_chunks - 1)


def test_sends_that_are_over_are_waited_for_before_they_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Paddle's group keeps a record of each for as long as the run lasts."""
    channels = p2p.P2PChannels.__new__(p2p.P2PChannels)
    done = Task()
    slow = Task(asked_before_done=1)
    channels._tasks = [done, slow]
    channels._forget_finished()
    assert (channels._tasks, done.waits, slow.waits) == ([slow], 1, 0)
    channels._forget_finished()
    assert (channels._tasks, slow.waits) == ([], 1)


def test_each_send_forgets_those_before_it(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p.P2PChannels, "_open", lambda self, order: None)
    channels = start(2, False)(0)
    tasks = [Task() for _ in range(4)]
    made = iter(tasks)
    monkeypatch.setattr(dist, "isend", lambda value, to, group: next(made))
    for _ in tasks:
        channels.send(paddle.zeros([1]), forward=True)
    assert [task.waits for task in tasks] == [1, 1, 1, 0]
    assert channels._tasks == tasks[-1:]
