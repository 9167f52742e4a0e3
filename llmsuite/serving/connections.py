"""Limits of connections: their number, and the time that one may be silent in either direction."""

from __future__ import annotations

import asyncio
import collections
import os
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from llmsuite.serving.fair_queue import Client, client_at
from llmsuite.serving.limits import Limits

BACKLOG = 64
"""Connections that may be accepted together; that many files may be opened before one is closed to make room."""
_RESERVE = 64
"""File descriptors reserved for anything but connections."""
_MAX_EARLY_BYTES = 1 << 20
"""Bytes of further requests that a client may send before its present one is answered."""
_BEFORE_RESPONSE = ("IDLE", "SEND_RESPONSE")
"""States of h11 in which a response may begin."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b'content-length: 86\r\n\r\n{"error": {"message": "the server has no room for more connections; try again later"}}'
)


def room_for_connections(requested: int) -> int:
    """Number of connections that this process can have open, at most `requested`: each needs a file descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested
    return max(1, min(requested, soft - len(os.listdir("/proc/self/fd")) - BACKLOG - _RESERVE))


class Connection(H11Protocol):
    """A connection that is closed when it is silent for too long, when its client sends too much before it is answered,
    or when there is no room for it."""

    limits: Limits
    room: int
    """Connections that may be open."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent_since = self._stuck_since = time.monotonic()
        self._last_cycle = self.cycle
        self._unsent = 0
        self._timer = self.loop.call_later(self.limits.header_timeout / 4, self._look)
        if len(self.connections) > self.room:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # a request that waits looks for the end of its connection by reading on, so that reading is never paused
        # for long: without a limit this would collect whatever a client sends meanwhile
        if not (self._is_idle or self.cycle.more_body):
            unread, _ = self.conn.trailing_data
            if len(unread) + len(data) > _MAX_EARLY_BYTES:
                self.transport.abort()
                return
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, unless it has been answered: it may be its body that is wrong."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the application sends from here on is ignored
            self.cycle.message_event.set()
        if repr(self.conn.our_state) in _BEFORE_RESPONSE:
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """True while no request is being answered; the head of one may be arriving."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _client(self) -> Client:
        return client_at(self.client[0] if self.client else "")

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest. If none is idle, close one whose request is still
        incomplete, of the client with the most connections, if it has more than this client; else this
        connection."""
        others = [c for c in self.connections if isinstance(c, Connection) and c is not self]
        idle = [c for c in others if c._is_idle]
        counts = collections.Counter(c._client for c in others)
        of_more = [c for c in others if c.cycle and c.cycle.more_body and counts[c._client] > counts[self._client]]
        if idle:
            min(idle, key=lambda c: c._silent_since).transport.abort()
        elif of_more:
            max(of_more, key=lambda c: counts[c._client]).transport.abort()
        else:
            self.transport.write(_FULL)
            self.transport.close()

    def _look(self) -> None:
        """Close the connection if its client sends no head, or receives nothing of what is sent."""
        now = time.monotonic()
        unsent = self.transport.get_write_buffer_size()
        if not self._is_idle or unsent or self.cycle is not self._last_cycle:
            self._silent_since = now
        if not unsent or unsent < self._unsent:
            self._stuck_since = now
        self._last_cycle = self.cycle
        self._unsent = unsent
        if now - min(self._silent_since, self._stuck_since) >= self.limits.header_timeout:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.limits.header_timeout / 4, self._look)


def connection_class(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class of connections with these limits, for `uvicorn.Config.http`."""
    members = {"limits": limits, "room": room_for_connections(limits.max_connections)}
    return type("LimitedConnection", (Connection,), members)
