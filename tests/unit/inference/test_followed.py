"""A rank that leads and one that follows: the other makes the same passes with caches of its own."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmsuite.inference import followed
from llmsuite.inference.batch import Batch, Line
from llmsuite.inference.followed import Leader, follow, lead
from llmsuite.inference.sampling import Sampling
from tests.unit.inference.toy_decoder import ToyDecoder


class Recorded(ToyDecoder):
    """Keeps what every pass saw."""

    def __init__(self) -> None:
        super().__init__(11, seed=2)
        self.passes: list[list[list[int]]] = []

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Any) -> Any:
        logits, present = super().forward(ids, padding, cache)
        self.passes.append(present[0].squeeze(-1).numpy().tolist())
        return logits, present


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[bytes]:
    """What the first rank tells the other."""
    sent: queue.Queue[bytes] = queue.Queue()

    def message(data: bytes | None) -> bytes:
        if data is None:
            return sent.get(timeout=30)
        sent.put(data)
        return data

    monkeypatch.setattr(followed.collective, "message_of_first_rank", message)
    return sent


def test_the_other_makes_the_same_passes(wire: queue.Queue[bytes]) -> None:
    mine, other = Recorded(), Recorded()
    thread = threading.Thread(target=follow, args=(other,))
    thread.start()
    leader = lead(mine)
    assert type(leader) is Leader
    batch = Batch(leader, fails_alone=True)
    lines = [Line([3, 4, 5][: 1 + i % 3], Sampling(max_new_tokens=2 + i), set()) for i in range(5)]
    alone = [Line(line.prompt, line.sampling, set()) for line in lines]
    batch.advance(lines[:2])
    batch.advance()
    batch.advance(lines[2:])
    batch.drop([lines[3]])
    while batch.lines:
        batch.advance()
    leader.end()
    thread.join()
    assert other.passes == mine.passes
    assert len(mine.passes) > 6
    for line, again in zip(lines, alone):
        own = Batch(ToyDecoder(11, seed=2))
        own.advance([again])
        while own.lines:
            own.advance()
        assert line.ids == again.ids[: len(line.ids)]
        assert line.finished or line is lines[3]


class Stepping(Recorded):
    """Gives more than answers, step by step."""

    def check_plain(self, what: str) -> None:
        pass

    def prompt_logits(self, ids: list[int], num_tokens: int | None) -> Iterator[list[int]]:
        for token in ids:
            self.passes.append([[token, num_tokens or 0]])
            yield [token]


def test_steps_are_made_between_passes_on_every_rank(wire: queue.Queue[bytes]) -> None:
    mine, other = Stepping(), Stepping()
    thread = threading.Thread(target=follow, args=(other,))
    thread.start()
    leader: Any = lead(mine)
    found, padding = [], np.asarray([0])
    for step in leader.prompt_logits([7, 8, 9], 2):
        found += step
        leader.forward(np.asarray([step]), padding, None)
    left = leader.prompt_logits([4, 5], 1)  # nobody waits for all of it
    assert next(left) == [4]
    left.close()
    leader.forward(np.asarray([[1]]), padding, None)
    leader.end()
    thread.join()
    assert found == [7, 8, 9]
    assert mine.passes == [[[7, 2]], [[7]], [[8, 2]], [[8]], [[9, 2]], [[9]], [[4, 1]], [[1]]]
    assert other.passes == mine.passes


def test_caches_that_nobody_has_are_forgotten(wire: queue.Queue[bytes]) -> None:
    leader = Leader(Recorded())
    _, cache = leader.forward(np.asarray([[1, 2]]), np.asarray([0]), None)
    wire.get()
    for token in range(3):
        _, cache = leader.forward(np.asarray([[token]]), np.asarray([0]), cache)
    gc.collect()
    leader.end()
    told = b"".join(wire.get() for _ in range(4)).decode()
    assert told.count('"forget"') == 3
    assert told.count('"end"') == 1


def test_a_pass_that_fails_ends_all(wire: queue.Queue[bytes], capsys: Any) -> None:
    class Failing(ToyDecoder):
        def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Any) -> Any:
            raise MemoryError("no room for it")

    ended: list[bool] = []
    leader = Leader(Failing(5), lambda: ended.append(True))
    with pytest.raises(MemoryError):
        leader.forward(np.asarray([[1]]), np.asarray([0]), None)
    assert ended == [True]
    assert "no room for it" in capsys.readouterr().err
    leader.end()


def test_the_others_hear_of_a_leader_that_has_nothing_to_do(
    wire: queue.Queue[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "_BEAT_SECONDS", 0.01)
    leader = Leader(Recorded())
    assert wire.get(timeout=30) == b'[["wait"]]'
    leader.end()
