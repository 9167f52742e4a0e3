"""Connections that say nothing, take nothing, or are too many."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llmsuite.serving import connections
from llmsuite.serving.app import make_app
from llmsuite.serving.connections import connection_class, room_for_connections
from llmsuite.serving.events import EventStream
from llmsuite.serving.jobs import StreamedAnswer
from llmsuite.serving.limits import Limits
from llmsuite.serving.protocol import CompletionRequest
from llmsuite.serving.server import make_server
from llmsuite.serving.service import Service
from tests.support.served import make_service

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def with_server(
    limits: Limits,
    scenario: Callable[[Callable[..., Awaitable[Opened]]], Awaitable[None]],
    service: Service | None = None,
) -> None:
    """Run a scenario with a server; it is given what opens a connection and sends some bytes."""

    async def run() -> None:
        nonlocal service
        service = service or make_service(limits)
        server = make_server(service, make_app(service, hosts=set()))
        serving = asyncio.create_task(server.serve([socket.create_server(("127.0.0.1", 0))]))
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def connect(sent: bytes, place: tuple[str, int] | None = None) -> Opened:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=place)
            writer.write(sent)
            await writer.drain()
            return reader, writer

        try:
            await asyncio.wait_for(scenario(connect), 120)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(run())


def slow_service(limits: Limits, seconds: float = 0.005) -> Service:
    """A service whose model needs some time for a pass."""
    service = make_service(limits)
    decoder: Any = service.generator.decoder
    forward = decoder.forward

    def slow(*given: Any) -> Any:
        time.sleep(seconds)
        return forward(*given)

    decoder.forward = slow
    return service


async def read_all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: local"], ids=["silent", "half"])
def test_a_client_without_a_whole_head_is_left(sent: bytes) -> None:
    async def scenario(connect: Any) -> None:
        opened = [await connect(sent) for _ in range(5)]
        assert [await read_all(reader) for reader, _ in opened] == [b""] * 5

    with_server(Limits(header_timeout=0.2), scenario)


def test_a_head_that_comes_by_drops_is_left() -> None:
    async def scenario(connect: Any) -> None:
        reader, writer = await connect(b"GET /healthz HTTP/1.1\r\n")
        ended = asyncio.create_task(read_all(reader))
        while not ended.done():
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.02)
        assert ended.result() == b""

    with_server(Limits(header_timeout=0.3), scenario)


def test_idle_connections_make_room() -> None:
    async def scenario(connect: Any) -> None:
        silent = [await connect(b"") for _ in range(4)]
        asking = await connect(HEALTH)
        assert (await asking[0].readline()).startswith(b"HTTP/1.1 200")
        assert await read_all(silent[0][0]) == b"", "it was idle for longest"
        assert not silent[1][0].at_eof()

    with_server(Limits(header_timeout=1000, max_connections=4), scenario)


def test_nobody_holds_all_connections_by_requests_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get in, and whoever has as many as anybody does not."""
    monkeypatch.setattr(connections, "client_at", lambda host: host)

    async def scenario(connect: Any) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        held = [await connect(head) for _ in range(4)]
        await asyncio.sleep(0.1)  # their heads have been read
        asking = await connect(HEALTH)
        assert (await asking[0].readline()).startswith(b"HTTP/1.1 503"), "it has as many itself"
        asking = await connect(HEALTH, ("127.0.0.2", 0))
        assert (await asking[0].readline()).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.1)
        assert sum(reader.at_eof() for reader, _ in held) == 1

    with_server(Limits(header_timeout=1000, body_timeout=1000, max_connections=4), scenario)


def test_one_connection_too_many_gets_503() -> None:
    async def scenario(connect: Any) -> None:
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        busy, writer = await connect(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await busy.readline()).startswith(b"HTTP/1.1 200")
        asking, _ = await connect(HEALTH)
        refused = await read_all(asking)
        assert refused.startswith(b"HTTP/1.1 503")
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the server has no room")
        writer.close()

    with_server(Limits(max_connections=1, max_new_tokens=4000), scenario)


@pytest.mark.parametrize(("unsent", "is_left"), [([9, 9, 9, 9, 9], True), ([9, 8, 7, 6, 5], False), ([0] * 5, False)])
def test_a_reader_has_to_take_something(monkeypatch: pytest.MonkeyPatch, unsent: list[int], is_left: bool) -> None:
    now = [0.0]
    aborted = []
    left = list(unsent)
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    made: Any = object.__new__(connection_class(Limits(header_timeout=2.5)))
    made.loop = types.SimpleNamespace(call_later=lambda *given: None)
    made.cycle = made._last_cycle = types.SimpleNamespace(response_complete=False)
    made._silent_since = made._stuck_since = 0.0
    made._unsent = 0
    made.transport = types.SimpleNamespace(
        get_write_buffer_size=lambda: left.pop(0), abort=lambda: aborted.append(now[0])
    )
    while left and not aborted:
        now[0] += 1
        made._look()
    assert bool(aborted) == is_left


def test_few_file_handles_leave_room_for_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(connections.os, "listdir", lambda path: ["0"] * 30)
    assert room_for_connections(512) == 256 - 30 - 64 - 64
    assert room_for_connections(50) == 50


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_ends_when_its_client_has_left(is_stream: bool) -> None:
    length = 2000
    limits = Limits(max_new_tokens=length)
    service = slow_service(limits)  # the whole answer would take ten seconds
    body = json.dumps({"prompt": "x", "max_tokens": length, "min_tokens": length, "stream": is_stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    def num_running() -> float:
        return float(service.metrics.running._value.get())

    async def scenario(connect: Any) -> None:
        _, writer = await connect(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while num_running() == 0:
            await asyncio.sleep(0.01)
        writer.close()
        while num_running():
            await asyncio.sleep(0.01)
        assert service.metrics.passes._value.get() < length / 2, "nothing is decoded for nobody"

    with_server(limits, scenario, service)


CHUNKED = "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
HEADS = {
    "answered": "GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
    "read": "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n",
    "no path": "POST /nothing HTTP/1.1\r\nHost: localhost\r\n",
    "another host": "POST /v1/completions HTTP/1.1\r\nHost: else.where\r\n",
    "no json": "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
}


@pytest.mark.parametrize("pause", [0.0, 0.2], ids=["at once", "answered before"])
def test_a_body_that_is_no_http_fails_nothing(caplog: pytest.LogCaptureFixture, pause: float) -> None:
    """Refused or not, answered or not: the connection ends, and no error is logged."""

    async def scenario(connect: Any) -> None:
        for head in HEADS.values():
            reader, writer = await connect((head + CHUNKED).encode())
            await asyncio.sleep(pause)
            writer.write(b"no chunk\r\n")
            received = await read_all(reader)
            assert received.count(b"HTTP/1.1 ") == (1 if received else 0)
        asking, _ = await connect(HEALTH)
        assert (await asking.readline()).startswith(b"HTTP/1.1 200")

    with_server(Limits(), scenario)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_what_a_client_sends_before_its_answer_has_a_limit() -> None:
    limits = Limits(max_new_tokens=4000)
    service = slow_service(limits)
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "min_tokens": 4000}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    async def scenario(connect: Any) -> None:
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        reader, writer = await connect(request)
        ended = asyncio.create_task(read_all(reader))
        num_sent = 0
        while not ended.done() and num_sent < 64 << 20:
            writer.write(HEALTH * 1000)
            num_sent += len(HEALTH) * 1000
            await asyncio.sleep(0.01)
        await ended  # 64 MiB of further requests are not kept until the answer is there
        while service.metrics.running._value.get():
            await asyncio.sleep(0.01)
        assert service.metrics.passes._value.get() < 4000

    with_server(limits, scenario, service)


def test_an_answer_ends_when_its_client_has_left_before_the_first_event() -> None:
    """Nothing runs the generator of the events then."""
    limits = Limits(max_new_tokens=2000)
    service = slow_service(limits)

    async def run() -> None:
        service.scheduler.start()
        body = CompletionRequest(prompt="x", max_tokens=2000, min_tokens=2000, stream=True)
        job, num_prompts = await service.start(body, "client")
        answer = StreamedAnswer(EventStream(service, body, job, num_prompts).events("client"), job)

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)

        await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        while service.metrics.running._value.get() or len(service.scheduler._streams):
            await asyncio.sleep(0.01)
        assert service.metrics.passes._value.get() < 1000, "nothing is decoded for nobody"
        await asyncio.to_thread(service.scheduler.stop)

    asyncio.run(asyncio.wait_for(run(), 60))
