"""Clients take turns: whatever one of them requests, the others are answered."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from llmsuite.inference.batch import DecodingSequence
from llmsuite.inference.decoder import DOUBLE_COST_LEN, Cache
from llmsuite.inference.sampling import Sampling
from llmsuite.serving.app import make_app
from llmsuite.serving.fair_queue import Client, FairQueue
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.scheduler import Busy, BusyClient, Scheduler, Steps
from tests.support.served import make_service
from tests.support.toy_decoder import ToyDecoder

A = "1.1.1.1"
B = "2.2.2.2"
C = "3.3.3.3"


@given(st.lists(st.tuples(st.sampled_from([A, B, C, "x"]), st.integers()), max_size=40))
def test_nobody_waits_for_more_than_one_of_each(entries: list[tuple[Client, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for client, entry in entries:
        queue.add(client, entry)
    left = dict.fromkeys((client for client, _ in entries), 0)
    for client, _ in entries:
        left[client] += 1
    assert {client: queue.count(client) for client in left} == left
    popped = []
    while queue:
        waiting = {client for client in left if left[client]}
        popped.append(queue.pop())
        left[popped[-1][0]] -= 1
        last = [client for client, _ in popped[-len(waiting) :]]
        assert len(set(last)) == len(last) or len(popped) < len(waiting), "a client has one turn in each round"
    for client in left:
        own = [entry for whose, entry in popped if whose == client]
        assert own == [entry for whose, entry in entries if whose == client], "each in its own order"


class Order(ToyDecoder):
    """Keeps which pass read and which decoded, and what prompts began."""

    def __init__(self) -> None:
        super().__init__(7, seed=1, max_length=20_000)
        self.passes: list[tuple[int, ...]] = []

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        self.passes.append(ids.shape)
        return super().forward(ids, padding, cache)


def scheduled(decoder: ToyDecoder, limits: Limits) -> tuple[Scheduler, Metrics]:
    metrics = Metrics()
    return Scheduler(decoder, metrics, limits), metrics


def sequences(count: int, prompt: Sequence[int] = (1,), most: int = 3) -> list[DecodingSequence]:
    return [DecodingSequence(prompt, Sampling(max_new_tokens=most), set()) for _ in range(count)]


def drain(scheduler: Scheduler, ended: list[Any], count: int) -> None:
    scheduler.start()
    with scheduler._changed:
        assert scheduler._changed.wait_for(lambda: len(ended) == count and scheduler._is_idle, 60)
    scheduler.stop()


def test_a_client_does_not_wait_for_all_that_another_one_asked_for() -> None:
    ended: list[str] = []

    def listener(name: str) -> Any:
        return lambda text, has_ended: ended.append(name) if has_ended else None

    scheduler, _ = scheduled(ToyDecoder(7, seed=1), Limits(batch_size=8))
    for _ in range(40):
        scheduler.submit(sequences(4), [listener("greedy")] * 4, A)
    scheduler.submit(sequences(4), [listener("modest")] * 4, B)
    drain(scheduler, ended, 164)
    last = max(number for number, name in enumerate(ended) if name == "modest")
    assert last < 16, "by turns: in the first batches"


def test_a_client_leaves_room_for_others() -> None:
    scheduler, _ = scheduled(ToyDecoder(7), Limits(max_waiting=16))
    ignored: Any = lambda text, has_ended: None  # noqa: E731
    scheduler.submit(sequences(12), [ignored] * 12, A)
    with pytest.raises(BusyClient):
        scheduler.submit(sequences(1), [ignored], A)
    scheduler.submit(sequences(4), [ignored] * 4, C)
    with pytest.raises(Busy):
        scheduler.submit(sequences(1), [ignored], B)
    other, _ = scheduled(ToyDecoder(7), Limits(max_waiting=16, max_waiting_per_client=2))
    with pytest.raises(BusyClient):
        other.submit(sequences(3), [ignored] * 3, A)


def test_too_many_answers_get_429_and_when_to_come_back() -> None:
    with TestClient(make_app(make_service(Limits(max_waiting=8, max_waiting_per_client=4)))) as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "n": 5})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "one client" in answer.json()["error"]["message"]
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "n": 9})
        assert (answer.status_code, "no room" in answer.json()["error"]["message"]) == (429, True)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "n": 4}).status_code == 200


def test_a_stream_stands_still_for_two_passes_of_others_at_most() -> None:
    decoder = Order()
    ended = list[int]()
    scheduler, metrics = scheduled(decoder, Limits(prompt_piece=256))

    def steps(count: int) -> Steps:
        for _ in range(count):
            decoder.passes.append((1, 256))
            yield
        return count

    def on_token(text: str, has_ended: bool) -> None:
        if has_ended:
            ended.append(1)

    talks = sequences(1, most=300)
    (long,) = sequences(1, [1 + i % 6 for i in range(15_000)])
    scheduler.submit([*talks, long], [on_token] * 2, A)
    made = [scheduler.submit_steps(steps(60), client) for client in (A, B, B)]
    drain(scheduler, ended, 2)
    assert [future.result() for future in made] == [60] * 3
    assert [len(line.ids) for line in (*talks, long)] == [300, 3]
    between = 0
    longest = 0
    for _, width in decoder.passes[2:]:
        between = 0 if width == 1 else between + 1
        longest = max(longest, between)
    assert longest == 2, "a step of other work, and a chunk of a prompt"
    (count,) = re.findall(r"^llmsuite_longest_gap_seconds_count ([\d.]+)$", metrics.text().decode(), re.MULTILINE)
    assert float(count) == 2


class Timed(Order):
    """A decoder whose passes take simulated time: as much for a pass, and as much for each token and each token before
    it."""

    def __init__(self, of_pass: float, of_token: float) -> None:
        super().__init__()
        self._of_pass = of_pass
        self._of_token = of_token
        self.now = 0.0
        self.decoded: list[float] = []
        """When decoding passes ended."""

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        logits, present = super().forward(ids, padding, cache)
        if ids.shape[1] == 1:
            self.now += self._of_pass
            self.decoded.append(self.now)
        else:
            self.now += self._of_pass + ids.size * self._of_token * (1 + len(present[0]) / DOUBLE_COST_LEN)
        return logits, present


@pytest.mark.parametrize("of_token", [1e-5, 1e-3, 0.05, 0.25])
def test_a_stream_stands_still_for_eight_decoding_passes_at_most(of_token: float) -> None:
    """However long a prompt is, and however much slower tokens are read than a pass decodes: counted in passes."""
    decoder = Timed(of_pass=1.0, of_token=of_token)
    ended = list[int]()
    scheduler = Scheduler(decoder, Metrics(), Limits(), clock=lambda: decoder.now)

    def steps() -> Steps:
        for _ in range(100):
            decoder.now += 1 + scheduler.next_chunk_tokens() * of_token
            yield

    def on_token(text: str, has_ended: bool) -> None:
        if has_ended:
            ended.append(1)

    (talk,) = sequences(1, most=1500)
    (long,) = sequences(1, [1 + i % 6 for i in range(8_000)])
    scheduler.submit([talk], [on_token], A)
    scheduler.submit([long], [on_token], B)
    scheduler.submit_steps(steps(), B)
    drain(scheduler, ended, 2)
    gaps = np.diff(decoder.decoded[: len(talk.ids)])  # until it ends: then nobody waits
    assert gaps.max() <= 8, "chunks begin small"
    reading = gaps[gaps > 1]
    assert reading.max() > 3 or of_token < 1e-3, "and grow to what streams can wait for, or to the largest"


def test_what_is_made_in_steps_ends_with_its_client() -> None:
    made: list[int] = []

    def steps() -> Steps:
        for number in range(100):
            made.append(number)
            yield

    scheduler, _ = scheduled(ToyDecoder(7), Limits())
    scheduler.submit_steps(steps(), A).cancel()
    failing = scheduler.submit_call(lambda: 1 // 0, B)
    drain(scheduler, [], 0)
    assert made == []
    assert isinstance(failing.exception(), ZeroDivisionError)
