"""Limits of a server: sizes of requests and answers, and timeouts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from llmsuite.serving.protocol import error

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    batch_size: int = 8
    """Answers decoded together."""
    max_waiting: int = 256
    """Answers that may be queued; beyond it is 429."""
    max_new_tokens: int = 1024
    """Most tokens of an answer."""
    max_body_bytes: int = 1_000_000
    """Size of a request; beyond it is 413."""
    body_timeout: float = 10.0
    """Seconds for a body to arrive; beyond it is 408."""
    request_timeout: float = 600.0
    """Seconds for an answer; beyond it is 504."""


class BodyLimits:
    """Reads the body of a request before anything else does, and refuses it when it is too large or too slow."""

    def __init__(self, app: Any, limits: Limits):
        self._app, self._limits = app, limits

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
        parts, size = [], 0
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
    # what is left of the request is not read
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
