"""A rank that leads and one that follows: the other makes the same passes with caches of its own."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmsuite.inference import driver
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.driver import DriverDecoder, as_driver, run_worker
from llmsuite.inference.sampling import Sampling
from tests.support.toy_decoder import ToyDecoder


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
    """Messages of the first rank to the other."""
    sent: queue.Queue[bytes] = queue.Queue()

    def message(data: bytes | None) -> bytes:
        if data is None:
            return sent.get(timeout=30)
        sent.put(data)
        return data

    monkeypatch.setattr(driver.collective, "broadcast_message", message)
    return sent


def test_the_worker_makes_the_same_passes(wire: queue.Queue[bytes]) -> None:
    mine = Recorded()
    other = Recorded()
    thread = threading.Thread(target=run_worker, args=(other,))
    thread.start()
    driver_decoder = as_driver(mine)
    assert type(driver_decoder) is DriverDecoder
    batch = Batch(driver_decoder, isolates_failures=True)
    sequences = [DecodingSequence([3, 4, 5][: 1 + i % 3], Sampling(max_new_tokens=2 + i), set()) for i in range(5)]
    alone = [DecodingSequence(line.prompt, line.sampling, set()) for line in sequences]
    batch.advance(sequences[:2])
    batch.advance()
    batch.advance(sequences[2:])
    batch.remove([sequences[3]])
    while batch.sequences:
        batch.advance()
    driver_decoder.end()
    thread.join()
    assert other.passes == mine.passes
    assert len(mine.passes) > 6
    for line, again in zip(sequences, alone):
        own = Batch(ToyDecoder(11, seed=2))
        own.advance([again])
        while own.sequences:
            own.advance()
        assert line.ids == again.ids[: len(line.ids)]
        assert line.finish_reason or line is sequences[3]


class Stepping(Recorded):
    """Gives more than answers, step by step."""

    def check_supports(self, what: str) -> None:
        pass

    def prompt_logits(self, ids: list[int], num_tokens: int | None) -> Iterator[list[int]]:
        for token in ids:
            self.passes.append([[token, num_tokens or 0]])
            yield [token]


def test_steps_are_made_between_passes_on_every_rank(wire: queue.Queue[bytes]) -> None:
    mine = Stepping()
    other = Stepping()
    thread = threading.Thread(target=run_worker, args=(other,))
    thread.start()
    driver_decoder: Any = as_driver(mine)
    found = []
    padding = np.asarray([0])
    for step in driver_decoder.prompt_logits([7, 8, 9], 2):
        found += step
        driver_decoder.forward(np.asarray([step]), padding, None)
    left = driver_decoder.prompt_logits([4, 5], 1)  # nobody waits for all of it
    assert next(left) == [4]
    left.close()
    driver_decoder.forward(np.asarray([[1]]), padding, None)
    driver_decoder.end()
    thread.join()
    assert found == [7, 8, 9]
    assert mine.passes == [[[7, 2]], [[7]], [[8, 2]], [[8]], [[9, 2]], [[9]], [[4, 1]], [[1]]]
    assert other.passes == mine.passes


def test_unreferenced_caches_are_freed(wire: queue.Queue[bytes]) -> None:
    driver_decoder = DriverDecoder(Recorded())
    _, cache = driver_decoder.forward(np.asarray([[1, 2]]), np.asarray([0]), None)
    wire.get()
    for token in range(3):
        _, cache = driver_decoder.forward(np.asarray([[token]]), np.asarray([0]), cache)
    gc.collect()
    driver_decoder.end()
    sent = b"".join(wire.get() for _ in range(4)).decode()
    assert sent.count('"forget"') == 3
    assert sent.count('"end"') == 1


def test_a_pass_that_fails_ends_all(wire: queue.Queue[bytes], capsys: Any) -> None:
    class Failing(ToyDecoder):
        def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Any) -> Any:
            raise MemoryError("no room for it")

    ended: list[bool] = []
    driver_decoder = DriverDecoder(Failing(5), lambda: ended.append(True))
    with pytest.raises(MemoryError):
        driver_decoder.forward(np.asarray([[1]]), np.asarray([0]), None)
    assert ended == [True]
    assert "no room for it" in capsys.readouterr().err
    driver_decoder.end()


def test_idle_workers_get_heartbeats(wire: queue.Queue[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_HEARTBEAT_SECONDS", 0.01)
    driver_decoder = DriverDecoder(Recorded())
    assert wire.get(timeout=30) == b'[["wait"]]'
    driver_decoder.end()
