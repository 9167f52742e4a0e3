"""The tool that asks a server very often sees what a server keeps, and what it answers wrongly."""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
from typing import Any

import pytest

from tests.tools.load import POISON
from tests.tools.long_serve import BYTES_A_REQUEST, LEAST_REQUESTS, MORE_MEMORY, ROUNDS, State, long_serve, requests

MIB = 2**20


class Answer:
    def __init__(self, status: int, said: bytes):
        self.status = status
        self._said = said

    def read(self) -> bytes:
        return self._said


class Connection(http.client.HTTPConnection):
    """Hands a request to a function, in place of a network."""

    def __init__(self, server: Fake):
        super().__init__("nowhere")
        self._server = server
        self._answer = Answer(500, b"")

    def request(self, method: str, url: str, body: Any = None, headers: Any = (), **more: Any) -> None:
        self._answer = self._server.answer(url, json.loads(body))

    def getresponse(self) -> Any:
        return self._answer


@dataclasses.dataclass
class Fake:
    """A server that answers by the request alone, and leaks a given amount with each of them."""

    memory: float = 0.0
    files: float = 0.0
    threads: float = 0.0
    busy: float = 0.0
    passes: float = 0.0
    """By how many the passes for a request grow with each request."""
    tokens: float = 0.0
    """Likewise."""
    wrong_from: int = 10**9
    """The number of the first text that is another one."""
    num_asked: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def connect(self) -> http.client.HTTPConnection:
        return Connection(self)

    def state(self) -> State:
        n = self.num_asked
        return State(
            memory=int(300 * MIB + n * self.memory),
            files=int(40 + n * self.files),
            threads=int(20 + n * self.threads),
            busy=int(n * self.busy),
            passes=int(5 * n + n * n * self.passes / 2),
            tokens=int(7 * n + n * n * self.tokens / 2),
        )

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        with self._lock:
            self.num_asked += 1
            is_wrong = self.num_asked > self.wrong_from
        if any(all(body.get(key) == value for key, value in wrong.items()) for wrong in POISON):
            return Answer(400, json.dumps({"error": {"message": "is wrong"}}).encode())
        if path == "/v1/embeddings":
            vectors = [[len(text) + is_wrong, 0.5] for text in body["input"]]
            return Answer(200, json.dumps({"data": [{"embedding": vector} for vector in vectors]}).encode())
        text = f"{body['model']} {body['seed']}" + " else" * is_wrong
        key = "message" if "messages" in body else None
        if not body["stream"]:
            choice = {"text": text} if key is None else {"message": {"content": text}}
            return Answer(200, json.dumps({"choices": [choice]}).encode())
        parts = [{"text": part} if key is None else {"delta": {"content": part}} for part in (text[:3], text[3:])]
        events = [f"data: {json.dumps({'choices': [part]})}" for part in parts]
        return Answer(200, "\n\n".join([*events, "data: [DONE]", ""]).encode())


def test_a_server_that_keeps_nothing_of_its_own_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    server = Fake(memory=BYTES_A_REQUEST)
    said = long_serve(server, LEAST_REQUESTS)
    assert said.startswith(f"{LEAST_REQUESTS:,} requests (")
    assert said.endswith("all answered as alone")
    assert server.num_asked == LEAST_REQUESTS + len(requests()), "and each of them alone"
    assert capsys.readouterr().out.count("5.00 passes a request\n") == ROUNDS


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"memory": MORE_MEMORY * 2 / LEAST_REQUESTS + BYTES_A_REQUEST}, "the server has grown by "),
        ({"files": 1 / 50}, r"round \d+: the server has \d+ files, more than "),
        ({"threads": 1 / 20}, r"round \d+: the server has \d+ threads, more than "),
        ({"busy": 1 / 100}, r"round 1: \d+ answers run or wait, though nobody asks"),
        ({"passes": 5 / LEAST_REQUESTS}, "rounds take more and more passes"),
        ({"tokens": 1 / LEAST_REQUESTS}, "the same requests have got "),
        ({"wrong_from": LEAST_REQUESTS}, "alone it is answered "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_keeps_something_is_seen(fault: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        long_serve(Fake(**fault), LEAST_REQUESTS)


def test_too_few_requests_are_no_test() -> None:
    with pytest.raises(AssertionError, match="are no series"):
        long_serve(Fake(), LEAST_REQUESTS - 1)
