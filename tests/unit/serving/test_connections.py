"""Connections that say nothing, take nothing, or are too many."""

from __future__ import annotations

import asyncio
import json
import resource
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llmsuite.serving import connections
from llmsuite.serving.app import make_app
from llmsuite.serving.connections import connection_class, room_for_connections
from llmsuite.serving.limits import Limits
from llmsuite.serving.server import make_server
from tests.unit.serving.served import make_service

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def with_server(limits: Limits, scenario: Callable[[Callable[[bytes], Awaitable[Opened]]], Awaitable[None]]) -> None:
    """Run a scenario with a server; it is given what opens a connection and sends some bytes."""

    async def run() -> None:
        service = make_service(limits)
        server = make_server(service, make_app(service, hosts=set()), "127.0.0.1", 0)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def connect(sent: bytes) -> Opened:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await writer.drain()
            return reader, writer

        try:
            await asyncio.wait_for(scenario(connect), 120)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(run())


async def whole(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: local"], ids=["silent", "half"])
def test_a_client_without_a_whole_head_is_left(sent: bytes) -> None:
    async def scenario(connect: Any) -> None:
        opened = [await connect(sent) for _ in range(5)]
        assert [await whole(reader) for reader, _ in opened] == [b""] * 5

    with_server(Limits(header_timeout=0.2), scenario)


def test_a_head_that_comes_by_drops_is_left() -> None:
    async def scenario(connect: Any) -> None:
        reader, writer = await connect(b"GET /healthz HTTP/1.1\r\n")
        ended = asyncio.create_task(whole(reader))
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
        assert await whole(silent[0][0]) == b"", "it was idle for longest"
        assert not silent[1][0].at_eof()

    with_server(Limits(header_timeout=1000, max_connections=4), scenario)


def test_one_connection_too_many_is_told() -> None:
    async def scenario(connect: Any) -> None:
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        busy, writer = await connect(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await busy.readline()).startswith(b"HTTP/1.1 200")
        asking, _ = await connect(HEALTH)
        refused = await whole(asking)
        assert refused.startswith(b"HTTP/1.1 503")
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the server has no room")
        writer.close()

    with_server(Limits(max_connections=1, max_new_tokens=4000), scenario)


@pytest.mark.parametrize(("unsent", "is_left"), [([9, 9, 9, 9, 9], True), ([9, 8, 7, 6, 5], False), ([0] * 5, False)])
def test_a_reader_has_to_take_something(monkeypatch: pytest.MonkeyPatch, unsent: list[int], is_left: bool) -> None:
    now, aborted, left = [0.0], [], list(unsent)
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
