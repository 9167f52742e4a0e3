"""A server that is asked very often: what it answers, what it holds, and what it computes for a request stay the same.

python -m tests.tools.long_serve [--requests N] [--seed SEED]

Clients with open connections ask a tiny model with twelve adapters for texts, chats, streams and embeddings, and for
what is refused. There are a few hundred different requests; every round asks for each of them as often. Behind a
warm-up, a round must leave the server with as much memory (but for `BYTES_A_REQUEST`), as many open files and as many
threads as the first one did, nothing running or waiting, and must have cost as many tokens, and about as many passes of
the model.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import http.client
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from tests.tools.load import POISON, Target

ADAPTERS = tuple(f"{letter}{number}" for number in range(4) for letter in "abc")
MODELS = ("tiny", *ADAPTERS)
KINDS = ("text", "chat", "text stream", "chat stream", "embedding", "refused")
VARIANTS = 2
CLIENTS = 16
ROUNDS = 10
WARM_UP = 2
"""Times that each request is made, at least, before the first round."""
LEAST_REQUESTS = (WARM_UP + ROUNDS) * len(MODELS) * len(KINDS) * VARIANTS
MORE_FILES = 8
"""Beyond those behind the warm-up: connections whose end the server has not seen yet. What a request leaves open is
there once for each of hundreds."""
MORE_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Likewise: the pool of the event loop grows to so many as it happens to need them."""
MORE_MEMORY = 8 * 2**20
"""Bytes: what the allocator holds moves by some megabytes, whatever is asked."""
BYTES_A_REQUEST = 512
"""Beyond `MORE_MEMORY`: about 100 were measured, of which nobody knows the owner."""
MORE_PASSES = 1.5
"""Times the passes of the first round: how many answers share one depends on when the clients ask."""
_SECONDS_TO_REST = 10
CLOSE = 1e-5
"""Between two vectors of length 1: texts are padded to those beside them, and sums are of another order."""


@dataclasses.dataclass(frozen=True)
class State:
    """What a server holds, between two rounds, and what it has done until then."""

    memory: int
    """Resident bytes."""
    files: int
    threads: int
    busy: int
    """Answers that run or wait."""
    passes: int
    tokens: int
    """Of answers."""


class Asked(Protocol):
    """A server that can be watched."""

    def connect(self) -> http.client.HTTPConnection: ...

    def state(self) -> State: ...


class Watched(Target):
    """A server of llmsuite, which is a process of this machine."""

    def state(self) -> State:
        """That at rest: the last answer has left the batch a moment after its client has it."""
        deadline = time.monotonic() + _SECONDS_TO_REST
        while (found := self._state()).busy and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _state(self) -> State:
        connection = self.connect()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()

        def metric(name: str) -> int:
            found = re.search(rf"^llmsuite_{name} ([\d.e+]+)$", text, re.MULTILINE)
            assert found is not None, f"{name} is no metric of the server"
            return int(float(found[1]))

        process = psutil.Process(self.pid)
        return State(
            memory=self.memory,
            files=process.num_fds(),
            threads=process.num_threads(),
            busy=metric("answers_running") + metric("answers_waiting"),
            passes=metric("passes_total"),
            tokens=metric("generated_tokens_total"),
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for."""

    kind: str
    path: str
    body: dict[str, Any]

    def said(self, status: int, content: bytes) -> Any:
        """What an answer says, without what differs each time."""
        wanted = 400 if self.kind == "refused" else 200
        assert status == wanted, (self, status, content[:500])
        if self.kind.endswith("stream"):
            events = content.decode().split("\n\n")
            assert events[-2] == "data: [DONE]", (self, content[-500:])
            return "".join(_text(json.loads(event.removeprefix("data: "))) for event in events[:-2])
        found = json.loads(content)
        if self.kind == "embedding":
            return [entry["embedding"] for entry in found["data"]]
        return found["error"]["message"] if self.kind == "refused" else _text(found)


def _text(answer: Any) -> str:
    """That of an answer's choices, or of a part of it."""
    said = [choice.get("message") or choice.get("delta") or choice for choice in answer["choices"]]
    return "".join(part.get("content") or part.get("text") or "" for part in said)


def requests() -> list[Request]:
    """All of them, once."""
    found = []
    for model in MODELS:
        for kind in KINDS:
            for variant in range(VARIANTS):
                number = len(found)
                body: dict[str, Any] = {"model": model}
                if kind == "embedding":
                    found.append(Request(kind, "/v1/embeddings", {**body, "input": [f"text {variant}", "a"]}))
                    continue
                body |= {
                    "max_tokens": 4 + number % 9,
                    "seed": number,
                    "temperature": variant,
                    "stream": "stream" in kind,
                }
                if kind.startswith("chat"):
                    body["messages"] = [{"role": "user", "content": f"turn {number % 5}"}]
                    found.append(Request(kind, "/v1/chat/completions", body))
                    continue
                body["prompt"] = f"text {number % 5}"
                body |= POISON[number % len(POISON)] if kind == "refused" else {}
                found.append(Request(kind, "/v1/completions", body))
    return found


class Client:
    """One that keeps its connection open."""

    def __init__(self, target: Asked):
        self._target = target
        self._connection = target.connect()

    def ask(self, request: Request) -> Any:
        """What the answer says."""
        try:
            return request.said(*self._exchanged(request))
        except (http.client.RemoteDisconnected, ConnectionError):  # it was idle for longer than the server waits
            self._connection.close()
            self._connection = self._target.connect()
            return request.said(*self._exchanged(request))

    def _exchanged(self, request: Request) -> tuple[int, bytes]:
        self._connection.request("POST", request.path, json.dumps(request.body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


def are_same(found: Any, alone: Any) -> bool:
    """Whether an answer is that of a request which nobody else asked beside."""
    if isinstance(found, str):
        return bool(found == alone)
    pairs = [pair for one, other in zip(found, alone, strict=True) for pair in zip(one, other, strict=True)]
    return all(abs(one - other) <= CLOSE for one, other in pairs)


class Series:
    """Rounds of requests to one server."""

    def __init__(self, target: Asked, seed: int):
        self._target = target
        self._chance = random.Random(seed)
        self._requests = requests()
        self._clients = [Client(target) for _ in range(CLIENTS)]
        self._alone = [self._clients[0].ask(request) for request in self._requests]
        self.counts: collections.Counter[str] = collections.Counter()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def round(self, times: int) -> State:
        """Ask for everything so many times, and compare; returns how the server is then."""
        numbers = [*range(len(self._requests))] * times
        self._chance.shuffle(numbers)
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            shares = [numbers[place::CLIENTS] for place in range(CLIENTS)]
            list(pool.map(self._ask, self._clients, shares))
        self.counts.update(self._requests[number].kind for number in numbers)
        return self._target.state()

    def _ask(self, client: Client, numbers: Sequence[int]) -> None:
        for number in numbers:
            request = self._requests[number]
            alone = self._alone[number]
            found = client.ask(request)
            assert are_same(found, alone), f"{request}: alone it is answered {alone!r}, here {found!r}"


def check(states: Sequence[State], num_requests: int) -> None:
    """Raise AssertionError where a server holds more, or computes more, than behind its warm-up.

    Args:
        states: behind the warm-up, and behind each round.
        num_requests: of a round.
    """
    first = states[0]
    for number, state in enumerate(states[1:], 1):
        assert state.busy == 0, f"round {number}: {state.busy} answers run or wait, though nobody asks"
        for what, limit in (("files", first.files + MORE_FILES), ("threads", first.threads + MORE_THREADS)):
            held = getattr(state, what)
            assert held <= limit, f"round {number}: the server has {held} {what}, more than {limit}"
    begin, end = (statistics.median(state.memory for state in part) for part in (states[1:4], states[-3:]))
    memory = ", ".join(f"{state.memory / 2**20:.0f}" for state in states)
    most = MORE_MEMORY + BYTES_A_REQUEST * num_requests * max(0, len(states) - 4)  # rounds between the two
    assert end - begin <= most, f"the server has grown by {(end - begin) / 2**20:.1f} MiB: {memory}"
    done = [
        (after.tokens - before.tokens, after.passes - before.passes) for before, after in itertools.pairwise(states)
    ]
    assert len({tokens for tokens, _ in done}) == 1, f"the same requests have got {done} tokens and passes"
    assert max(passes for _, passes in done) <= MORE_PASSES * done[0][1], f"rounds take more and more passes: {done}"


def long_serve(target: Asked, num_requests: int, seed: int = 0) -> str:
    """Ask a server about so many times.

    Returns:
        A line on what was done.

    Raises:
        AssertionError: an answer is another one than alone, or the server holds or computes more and more (`check`).
    """
    series = Series(target, seed)
    size = len(requests())
    times = (num_requests // size - WARM_UP) // ROUNDS
    assert times > 0, f"fewer than {LEAST_REQUESTS} requests are no series"
    begun = time.monotonic()
    states = [series.round(num_requests // size - times * ROUNDS)]
    for number in range(1, ROUNDS + 1):
        states.append(series.round(times))
        count = series.counts.total()
        state = states[-1]
        print(
            f"round {number} of {ROUNDS}: {count:,} requests, {count / (time.monotonic() - begun):.1f}/s, "
            f"{state.memory / 2**20:.0f} MiB, {state.files} files, {state.threads} threads, "
            f"{(state.passes - states[-2].passes) / (times * size):.2f} passes a request",
            flush=True,
        )
        check(states, times * size)
    series.close()
    kinds = ", ".join(f"{count:,} of {kind}" for kind, count in series.counts.items())
    return f"{series.counts.total():,} requests ({kinds}), all answered as alone"


def main(words: Sequence[str]) -> int:
    """Ask a server of a tiny model."""
    from tests.multi.conftest import Runner
    from tests.support import tiny_llama
    from tests.support.served_adapters import write_adapter
    from tests.support.server import Server
    from tests.support.several_adapters import CONFIG

    parser = argparse.ArgumentParser(description="Ask a server very often.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    if given.requests < LEAST_REQUESTS:
        parser.error(f"--requests {given.requests}: has to be at least {LEAST_REQUESTS}")
    with tempfile.TemporaryDirectory() as place:
        runner = Runner(Path(place))
        tiny_llama.write(runner.directory / "base", CONFIG, tokenizer=tiny_llama.TOKENIZER)
        named = [
            f"{name}={write_adapter(runner.directory / name, name[0], seed=1000 * int(name[1:]))}" for name in ADAPTERS
        ]
        server = Server(runner, runner.directory / "base", "--adapters", *named, "--batch_size", str(CLIENTS))
        try:
            print(long_serve(Watched(server.port, server.process.pid), given.requests, given.seed))
        finally:
            assert server.stop() == 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
