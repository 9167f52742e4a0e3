"""A client is its address, whatever it sends along: who makes up keys, names or addresses gets no further turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request

from llmsuite.base.errors import UserError
from llmsuite.cli.serve import _check_proxies
from llmsuite.inference.generate import Generator
from llmsuite.serving.app import make_app
from llmsuite.serving.fair_queue import client_of
from llmsuite.serving.limits import Limits
from llmsuite.serving.server import make_server
from llmsuite.serving.service import Service
from tests.support.served import TableDecoder, make_service

WAITING = 2
"""Answers of one client that may wait."""
MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": ("/v1/completions", {"prompt": "a"}, 2),
    "stream": ("/v1/completions", {"prompt": "a", "stream": True}, 2),
    "n": ("/v1/completions", {"prompt": "a", "n": 2}, 1),
    "best_of": ("/v1/completions", {"prompt": "a", "best_of": 2}, 1),
    "prompts": ("/v1/completions", {"prompt": ["a", "b"]}, 1),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, 2),
    "chats": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, 1),
    "response": ("/v1/responses", {"input": "a"}, 2),
    "embedding": ("/v1/embeddings", {"input": ["a", "b"]}, 2),
    "echo": ("/v1/completions", {"prompt": "a b", "echo": True, "logprobs": 1, "max_tokens": 0}, 2),
}
"""Requests, and the number of them that gives as many answers as one client may have in the queue."""


class Everything(TableDecoder):
    """A decoder for all kinds of work of the scheduler."""

    def embed(self, texts: Sequence[Sequence[int]], num_tokens: int) -> Iterator[np.ndarray]:
        yield np.zeros([len(texts), 4], "float32")

    def prompt_logits(self, ids: Sequence[int], num_tokens: int) -> Iterator[np.ndarray]:
        yield np.zeros([len(ids) - 1, self.vocab_size], "float32")


def resting_service() -> Service:
    """Its scheduler has not been started: what is queued stays there."""
    given = make_service()
    generator = Generator(Everything(given.generator.decoder.vocab_size), given.generator.tokenizer)
    limits = Limits(max_waiting=8, max_waiting_per_client=WAITING)
    return Service(generator, given.prompter, "toy", limits, given.metrics)


def num_queued(service: Service) -> int:
    return len(service.scheduler._waiting) + len(service.scheduler._tasks)


async def post(app: Any, path: str, body: dict[str, Any], address: str = "9.9.9.9", **headers: str) -> tuple[int, str]:
    """Status and body of the answer to a request, of which nothing is read when it is refused by its head."""
    sent: list[dict[str, Any]] = []
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    named = {"content-type": "application/json", "host": "localhost", **headers}
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    scope |= {"headers": [(name.encode(), value.encode()) for name, value in named.items()], "client": (address, 1)}
    scope |= {"scheme": "http", "server": ("localhost", 80), "http_version": "1.1", "asgi": {"version": "3.0"}}
    await app(scope, receive, send)
    if sent[0]["status"] == 401:
        assert given, "the body is not read"
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


@contextlib.asynccontextmanager
async def waiting(service: Service, requests: list[Any]) -> AsyncIterator[None]:
    """While requests wait for their answers, as many as may."""
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        while num_queued(service) < WAITING:
            assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
            await asyncio.sleep(0.01)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("kind", ASKED)
def test_another_key_is_no_other_client(kind: str) -> None:
    path, body, count = ASKED[kind]
    service = resting_service()
    app = make_app(service)

    def ask(number: int, address: str = "9.9.9.9") -> Any:
        named = {"authorization": f"Bearer key-{number}", "x-forwarded-for": f"8.8.8.{number}"}
        more = {"user": f"user-{number}"}
        return post(app, path, {**body, **more}, address, **named)

    async def scenario() -> None:
        async with waiting(service, [ask(number) for number in range(count)]):
            status, said = await ask(7)
            assert (status, "one client" in said) == (429, True)
            other = asyncio.create_task(ask(7, "9.9.9.10"))
            while num_queued(service) == WAITING:
                assert not other.done(), other.result()
                await asyncio.sleep(0.01)
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("path", sorted({path for path, _, _ in ASKED.values()} | {"/tokenize", "/detokenize"}))
def test_a_wrong_key_is_refused_before_anything_is_read_or_queued(path: str) -> None:
    service = resting_service()
    app = make_app(service, api_key="right")
    for key in ("", "Bearer ", "Bearer wrong", "Bearer right ", "bearer right", "Basic right"):
        status, _ = asyncio.run(post(app, path, {"prompt": "a"}, authorization=key))
        assert status == 401, key
    assert num_queued(service) == 0
    found = service.metrics.text().decode()
    assert 'llmsuite_requests_total{path="refused",status="401"} 6.0' in found
    assert "llmsuite_prompt_tokens_total 0.0" in found


def client(address: str, **headers: str) -> str:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return client_of(Request({"type": "http", "headers": named, "client": (address, 1)}))


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("127.0.0.1", "127.9.8.7", True),
        ("127.0.0.1", "::1", True),
        ("127.0.0.1", "::ffff:127.0.0.3", True),
        ("127.0.0.1", "192.0.2.1", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff:2:3:4", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
        ("testclient", "other", False),
    ],
)
def test_a_client_is_all_that_one_host_may_call_itself(first: str, second: str, are_one: bool) -> None:
    assert (client(first) == client(second)) == are_one
    assert client(first, authorization="Bearer a") == client(first, authorization="Bearer b", x_forwarded_for=second)


@pytest.mark.parametrize(("proxies", "found"), [((), "localhost"), (("127.0.0.0/8",), "203.0.113.9")])
def test_only_a_proxy_that_is_named_says_whom_it_asks_for(proxies: Sequence[str], found: str) -> None:
    app = FastAPI()

    @app.get("/")
    async def who(request: Request) -> str:
        return client_of(request)

    async def scenario() -> None:
        server = make_server(make_service(), app, proxies)
        serving = asyncio.create_task(server.serve([socket.create_server(("127.0.0.1", 0))]))
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "GET / HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 198.51.100.1, 203.0.113.9\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = (await reader.read()).decode()
        server.should_exit = True
        await serving
        assert answer.endswith(f'"{found}"')

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_proxy_is_an_address() -> None:
    _check_proxies(["127.0.0.1", "10.0.0.0/8", "::1"])
    for wrong in ("*", "proxy.example", "127.0.0.1:80", "10.0.0.1/8", ""):
        with pytest.raises(UserError, match=r"--proxy .*is no address or network, such as 127\.0\.0\.1"):
            _check_proxies([wrong])
