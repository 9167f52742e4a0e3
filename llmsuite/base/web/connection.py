"""HTTP connections with a deadline for the complete response, also when its bytes arrive slowly one by one.

The timeout of a socket applies to each read: here it is set to the time left before each read.
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
    """The time by which a response has to be complete."""

    def __init__(self, seconds: float, rate: float | None = None):
        """
        Args:
            seconds: from now.
            rate: bytes that extend the deadline by a second, up to `seconds` from the time of their arrival.
        """
        self._seconds = seconds
        self._rate = rate
        self._until = time.monotonic() + seconds

    @property
    def message(self) -> str:
        """The error message when the deadline is missed."""
        if self._rate is None:
            return f"timed out: it has not answered in full within {self._seconds:g} s"
        return f"timed out: it stalls, or sends less than {self._rate:,} bytes per second"

    def left(self) -> float:
        """Return the seconds left. Raises TimeoutError where none are left."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def extend(self, count: int) -> None:
        """Extend the deadline after `count` bytes of the content have arrived."""
        if self._rate is not None:
            self._until = min(time.monotonic() + self._seconds, self._until + count / self._rate)


class _Reading(io.RawIOBase):
    """A stream that reads from a socket until a deadline."""

    def __init__(self, connected: socket.socket, deadline: Deadline):
        self._socket = connected
        self._deadline = deadline
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
    """A socket in the form that `HTTPResponse` opens."""

    def __init__(self, connected: socket.socket, deadline: Deadline):
        self._connected = connected
        self._deadline = deadline

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
        """Constructor of the response."""
        return functools.partial(_Response, deadline=self.deadline)

    def connect(self) -> None:
        # the timeout applies to each address of the host; the lookup has the timeout of the system
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
    """An encrypted connection that ends at a deadline; its base class connects by `_Http`."""


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
    """Send a request. Returns the response of any status: no redirect is followed. Proxies of the environment are used.

    Raises:
        OSError, http.client.HTTPException: there is no response before the deadline.
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
