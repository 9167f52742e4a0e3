"""Connections of HTTP that end at a deadline, however the bytes of an answer drip.

A time-out of a socket is one of each read: here each read has what is left of all the time there is.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import time
import urllib.request
from typing import Any


class Deadline:
    """When an answer has to be there."""

    def __init__(self, seconds: float, rate: float | None = None):
        """
        Args:
            seconds: from now.
            rate: bytes that give a second more, up to so many seconds from then on.
        """
        self._seconds, self._rate = seconds, rate
        self._until = time.monotonic() + seconds

    @property
    def missed(self) -> str:
        """What was not kept."""
        if self._rate is None:
            return f"timed out: it has not answered in full within {self._seconds:g} s"
        return f"timed out: it stands still, or sends less than {self._rate:,} bytes a second"

    def left(self) -> float:
        """Seconds that are left. Raises TimeoutError where none are."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def came(self, count: int) -> None:
        """So many bytes of the content have come."""
        if self._rate is not None:
            self._until = min(time.monotonic() + self._seconds, self._until + count / self._rate)


class _Reading(io.RawIOBase):
    """What comes from a socket before a deadline."""

    def __init__(self, connected: socket.socket, deadline: Deadline):
        self._socket, self._deadline = connected, deadline
        self._file = connected.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._deadline.left())
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Readable:
    """A socket, as a response opens it."""

    def __init__(self, connected: socket.socket, deadline: Deadline):
        self._connected, self._deadline = connected, deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reading(self._connected, self._deadline))


class _Response(http.client.HTTPResponse):
    def __init__(self, connected: socket.socket, *given: Any, deadline: Deadline, **more: Any):
        super().__init__(_Readable(connected, deadline), *given, **more)  # type: ignore[arg-type]


class _Http(http.client.HTTPConnection):
    """A connection that ends at a deadline."""

    deadline: Deadline

    @property
    def response_class(self) -> Any:  # type: ignore[override]
        """What reads an answer."""
        return functools.partial(_Response, deadline=self.deadline)

    def connect(self) -> None:
        # the time-out is that of each address of the host; looking them up has the time-out of the system
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        self.timeout = self.deadline.left() / len(addresses)
        super().connect()
        self.sock.settimeout(self.deadline.left())

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        left = memoryview(data)
        while left:
            self.sock.settimeout(self.deadline.left())
            left = left[self.sock.send(left) :]


class _Https(http.client.HTTPSConnection, _Http):
    """The same, encrypted: the base connects by `_Http`."""


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, deadline: Deadline):
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_connection, _Http, self._deadline), req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, deadline: Deadline):
        super().__init__()
        self._deadline = deadline

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_connection, _Https, self._deadline), req)


def _connection(kind: type[_Http], deadline: Deadline, host: str, **more: Any) -> _Http:
    made = kind(host, **more)
    made.deadline = deadline
    return made


def send(request: urllib.request.Request, deadline: Deadline) -> http.client.HTTPResponse:
    """The answer to a request whatever its status: no redirect is followed. The proxies of the environment are used.

    Raises:
        OSError, HTTPException: there is none, or not before the deadline.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        _HttpHandler(deadline),
        _HttpsHandler(deadline),
    ):
        opener.add_handler(handler)
    response: http.client.HTTPResponse = opener.open(request)
    return response
