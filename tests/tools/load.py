"""Many clients of one server, of which some do what no client should: no good one loses anything, memory stays flat.

python -m tests.tools.load [CLIENTS [ROUNDS]]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import http.client
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MAX_GROWTH = 48 * 2**20
"""Bytes by which the server may grow behind the first round; it is told of memory that its allocator keeps."""
POISON: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1e-40},
    {"temperature": 1e300},
    {"prompt": "\ud800"},
    {"prompt": [10**9]},
    {"stop": "x" * 2000},
    {"max_tokens": 10**9},
    {"n": 1000},
    {"unknown": 1},
)
"""What no request for a completion may have."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A server that listens on this machine, on any host name, without an API key."""

    port: int
    pid: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def post(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and body of an answer; asked again while the server is full."""
        while True:
            connection = self.connect()
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            if answer.status not in (429, 503):
                return answer.status, content
            time.sleep(0.1)

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


def _body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": f"client {number % 7}",
        "max_tokens": 8 + number % 9,
        "temperature": 1,
        "seed": number % 7,
        **more,
    }


def good(target: Target, number: int) -> str:
    """A whole answer."""
    status, content = target.post(_body(number))
    assert status == 200, (status, content)
    return str(json.loads(content)["choices"][0]["text"])


def streamed(target: Target, number: int) -> str:
    """An answer by events."""
    status, content = target.post(_body(number, stream=True))
    lines = content.decode().split("\n\n")
    assert (status, lines[-2]) == (200, "data: [DONE]"), (status, content)
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2])


def poisoned(target: Target, number: int) -> None:
    """A request that no server should accept."""
    status, content = target.post({**_body(number), **POISON[number % len(POISON)]})
    assert status == 400, (status, content)
    assert json.loads(content)["error"]["message"]


def dropped(target: Target, number: int) -> None:
    """A client that goes in the middle of its stream."""
    connection = target.connect()
    body = json.dumps(_body(number, stream=True, max_tokens=64, min_tokens=64))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read(10)
    connection.close()


def slow(target: Target, number: int) -> None:
    """A client that takes its stream by bytes, and then no more of it."""
    connection = target.connect()
    body = json.dumps(_body(number, stream=True, max_tokens=64, min_tokens=64))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    for _ in range(20):
        answer.read(1)
        time.sleep(0.02)
    connection.close()


def silent(target: Target, number: int) -> None:
    """A client that sends nothing, half a head, or half a body, until it is left."""
    half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = half + b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", target.port), timeout=120) as connection:
        try:
            connection.sendall((b"", half, body)[number % 3])
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass


_KINDS: tuple[Callable[[Target, int], Any], ...] = (good, poisoned, streamed, dropped, good, slow, streamed, silent)


def load(target: Target, clients: int, rounds: int, requests: int = 4) -> str:
    """Let clients of all kinds ask at once, a few rounds of them.

    Args:
        target: a server whose limits of time are a few seconds.
        clients: that ask at the same time.
        rounds: after each of them the memory is looked at.
        requests: of each client in a round.

    Returns:
        A line on what was done.

    Raises:
        AssertionError: an answer is missing or another one than the client gets alone, or the memory has grown.
    """
    alone = {number: good(target, number) for number in range(63)}
    memory: list[int] = []
    count = 0
    for _ in range(rounds):
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            asked = [(_KINDS[i % len(_KINDS)], i) for i in range(clients * requests)]
            futures = [(kind, i, pool.submit(kind, target, i)) for kind, i in asked]
            for kind, i, future in futures:
                said = future.result()
                if kind in (good, streamed):
                    assert said == alone[i % 63], f"client {i} was told something else than alone"
                    count += 1
        memory.append(target.memory)
    grown = memory[-1] - memory[0]
    assert grown <= MAX_GROWTH, f"the server has grown by {grown / 2**20:.0f} MiB: {memory}"
    return f"{count} good answers of {len(asked) * rounds} requests, memory grown by {grown / 2**20:.1f} MiB"


def main(words: list[str]) -> int:
    """Load a server of a tiny model."""
    from tests.multi.conftest import Runner
    from tests.support.server import Server
    from tests.support.written_family import write_family

    clients, rounds = [*map(int, words), *(48, 6)[len(words) :]]
    with tempfile.TemporaryDirectory() as place:
        runner = Runner(Path(place))
        model = write_family(runner.directory / "served", "llama")
        server = Server(runner, model, *LIMITS)
        try:
            print(load(Target(server.port, server.process.pid), clients, rounds))
        finally:
            assert server.stop() == 0
    return 0


LIMITS = ("--header_timeout", "3", "--body_timeout", "3", "--max_new_tokens", "64", "--max_waiting", "32")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
