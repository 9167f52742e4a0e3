"""Limits of a server: sizes of requests and answers, timeouts, and trusted hosts."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
import math
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from llmsuite.serving.protocol import error

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?")
"""A host in its header, with or without a port."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    batch_size: int = 8
    """Answers decoded together."""
    max_waiting: int = 256
    """Most answers in the queue; more get 429."""
    max_waiting_per_client: int | None = None
    """Most queued answers of one client; None for three quarters of `max_waiting`, so that others find room."""
    prompt_piece: int = 256
    """Most prompt tokens that are read between two passes over the answers."""
    max_new_tokens: int = 1024
    """Most tokens of an answer."""
    prefix_cache_mb: int = 256
    """Megabytes for keys and values of prompts, which later prompts with the same beginning do not compute again; 0 for
    none. Models with interventions or prefixes, and exported ones, have no prefix cache."""
    max_body_bytes: int = 1_000_000
    """Largest body of a request; a larger one gets 413."""
    body_timeout: float = 10.0
    """Seconds for a body to arrive; a slower one gets 408."""
    request_timeout: float = 600.0
    """Seconds for an answer; a slower one gets 504."""
    max_connections: int = 512
    """Most open connections. For a new one the one is closed that has been idle for longest; if none is idle, the new
    one gets 503."""
    header_timeout: float = 10.0
    """Seconds in which a client has to send the head of a request, and in which it has to receive some of the response;
    else its connection is closed."""

    @property
    def share_of_client(self) -> int:
        """Most queued answers of one client."""
        return self.max_waiting_per_client or math.ceil(self.max_waiting * 3 / 4)


class TrustedHosts:
    """Middleware that only passes on requests that name this server as their host, and come from no other web page.

    A page in a browser can reach servers on its user's machine, also by a host name of the page that resolves to this
    machine (DNS rebinding). A server without a key therefore requires one of its own names, or an IP address.
    """

    def __init__(self, app: Any, names: Collection[str]):
        """`names`: trusted hosts, in lower case; "localhost" and IP addresses are always trusted."""
        self._app = app
        self._names = {"localhost", *names}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        fault = None
        if scope["type"] == "http":
            fault = self._fault(dict(scope["headers"]))
        if fault is not None:
            await _refuse(send, 403, fault)
            return
        await self._app(scope, receive, send)

    def _fault(self, headers: dict[bytes, bytes]) -> str | None:
        host, origin = (headers.get(key, b"").decode("latin1").lower() for key in (b"host", b"origin"))
        found = _HOST.fullmatch(host)
        name = found[1].strip("[]") if found else ""
        if name not in self._names and not is_address(name):
            return f"host {host[:100]!r} is not a name of this server; start it with --allowed_host NAME, or an API key"
        if origin and origin.partition("://")[2] != host:
            return f"the page {origin[:100]!r} may not send requests to this server, which has no API key"
        return None


def is_address(name: str) -> bool:
    """True for a host that is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class BodyLimits:
    """Middleware that reads the body of a request first, and refuses one that is too large or too slow."""

    def __init__(self, app: Any, limits: Limits):
        self._app = app
        self._limits = limits

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(scope, receive), self._limits.body_timeout)
        except asyncio.TimeoutError:
            await _refuse(send, 408, f"the body did not arrive within {self._limits.body_timeout:g} seconds")
            return
        if body is None:
            await _refuse(send, 413, f"the body is larger than {self._limits.max_body_bytes:,} bytes")
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
        """The body; None when it is too large."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limits.max_body_bytes:
            return None
        parts = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.max_body_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps(error(message)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    # the rest of the request is not read, so that the connection cannot be used again
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
