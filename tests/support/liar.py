"""A server that lies on the wire, and what reads it: each reader of the suite that asks another machine over HTTP."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsuite.data import remote
from llmsuite.inference.group_sampling import SampleRequest, SamplingParams
from llmsuite.rl.reward_http import http
from llmsuite.rl.reward_sections import HttpSection
from llmsuite.rl.rollout_server import RolloutServer, Version
from llmsuite.rl.vllm_server import VllmServer
from tests.support.reward_case import completion

SECRET = "s3cr3t"
SECONDS = 0.4
"""The deadline of readers of what does not end."""
PATIENCE = 20.0
"""The deadline of readers of what ends at once, on a machine that is busy."""
_LONGEST = 20.0
"""Seconds after which a liar stops by itself: far behind the deadline."""
_OK = b"HTTP/1.1 200 OK\r\n"
_ENDLESS = b" " * (1 << 20)


def _whole(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Liar:
    """Answers every request with a lie, over and over where the lie has no end."""

    def __init__(self, first: bytes, more: bytes = b"", pause: float = 0.0, hold: bool = False):
        """
        Args:
            first: what is sent at once.
            more: what is sent after it, again and again.
            pause: seconds in between.
            hold: whether the connection stays open, and silent, behind `first`.
        """
        self.seconds = SECONDS if more or hold else PATIENCE
        """The deadline of its readers."""
        self.asked: list[bytes] = []
        """What each request has begun with."""
        self._first = first
        self._more = more
        self._pause = pause
        self._hold = hold
        self._closing = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        began = time.monotonic()
        try:
            with connection:
                self.asked.append(_request_of(connection))
                connection.sendall(self._first)
                while (self._more or self._hold) and time.monotonic() - began < _LONGEST:
                    if self._closing.wait(self._pause or (0.05 if self._hold else 0.0)):
                        return
                    connection.sendall(self._more)
        except OSError:
            pass


def _request_of(connection: socket.socket) -> bytes:
    """A whole request: a connection that is closed with bytes unread is reset, and the answer lost."""
    data = b""
    while b"\r\n\r\n" not in data and data[:1] != b"\x16":  # which begins to encrypt
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


LIES: dict[str, Callable[[str], Liar]] = {
    "silence": lambda other: Liar(b"", hold=True),
    "a head that drips": lambda other: Liar(_OK, b"x", pause=0.05),
    "a body that drips": lambda other: Liar(_OK + b"\r\n", b" ", pause=0.05),
    "chunks that drip": lambda other: Liar(_OK + b"Transfer-Encoding: chunked\r\n\r\n", _chunk(b" "), pause=0.05),
    "a body without end": lambda other: Liar(_OK + b"\r\n", _ENDLESS),
    "chunks without end": lambda other: Liar(_OK + b"Transfer-Encoding: chunked\r\n\r\n", _chunk(_ENDLESS)),
    "a trailer without end": lambda other: Liar(
        _OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 1000, pause=0.01
    ),
    "a head without end": lambda other: Liar(_OK, b"a: b\r\n" * 1000),
    "continue without end": lambda other: Liar(b"", b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.01),
    "a length that is too large": lambda other: Liar(_OK + f"Content-Length: {1 << 50}\r\n\r\n".encode(), hold=True),
    "a body that breaks off": lambda other: Liar(_OK + b"Content-Length: 100\r\n\r\n{"),
    "a chunk that breaks off": lambda other: Liar(_OK + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{"),
    "a chunk of a negative size": lambda other: Liar(_OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n"),
    "no HTTP": lambda other: Liar(b"\x1b]0;\x00 SSH-2.0-OpenSSH_9.6\r\n"),
    "a bomb": lambda other: Liar(_whole(gzip.compress(bytes(64 << 20)), "Content-Encoding: gzip")),
    "another encoding": lambda other: Liar(_whole(b"{}", "Content-Encoding: br")),
    "packed and not whole": lambda other: Liar(_whole(gzip.compress(b"{}" * 99)[:-9], "Content-Encoding: gzip")),
    "another host": lambda other: Liar(_whole(b"", f"Location: {other}/there", status="302 Found")),
    "another host, and the method": lambda other: Liar(
        _whole(b"", f"Location: {other}/there", status="307 Temporary Redirect")
    ),
    "another protocol": lambda other: Liar(_whole(b"", "Location: file:///etc/passwd", status="301 Moved")),
    "no address": lambda other: Liar(_whole(b"", "Location: http://[", status="301 Moved")),
    "a very long address": lambda other: Liar(_whole(b"", f'Location: /x"{"a" * 60_000}', status="301 Moved")),
    "itself": lambda other: Liar(_whole(b"", "Location: /again", status="301 Moved")),
    "a redirect without end": lambda other: Liar(b"HTTP/1.1 302 Found\r\nLocation: /again\r\n\r\n", _ENDLESS),
    "an error without end": lambda other: Liar(b"HTTP/1.1 404 Not Found\r\n\r\n", _ENDLESS),
    "an error that is deep": lambda other: Liar(_whole(b"[" * 100_000, status="400 Bad Request")),
    "an error that drives a terminal": lambda other: Liar(
        _whole(rb'{"error": {"message": "\u001b]0;owned\u0007 \ud800"}}', status="400 Bad Request")
    ),
}
"""By name what is not HTTP, too much, too slow, or leads elsewhere; each gets the address of another host."""

JSON_LIES: dict[str, bytes] = {
    "deep lists": b"[" * 100_000,
    "deep lists that end": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep behind a text": b'{"\\\\\\"[": ' + b"[" * 900 + b"]" * 900 + b"}",
    "no JSON": b"<p>busy</p>",
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
    "half": b'{"choices": [',
    "a number without end": b"1" * 10_000,
    "null": b"null",
    "a text": b'"choices"',
    "a list": b"[[]]",
}
"""By name what is no answer in JSON that any reader asks for."""


def rollout(kind: type[RolloutServer], url: str, seconds: float = PATIENCE) -> Any:
    """Completions of two prompts, two of each."""
    server = kind(url, seconds, 0, threading.Event(), 512)
    requests = [SampleRequest((1, 2), (3,)), SampleRequest((4,), (5,))]
    return server.sample(Version(7, Path("/x"), "d" * 64), requests, SamplingParams(2, 4, 1.0, 8), {2})


def reward(url: str, seconds: float) -> Any:
    """Scores of two completions."""
    section = HttpSection(url=f"{url}/score?key={SECRET}", timeout=seconds, retries=0)
    return http(section)([completion("4"), completion("5", 1)])


def data(url: str, seconds: float) -> Any:
    """A file, within the deadline that all downloads have."""
    return remote.fetch(f"{url}/rows.jsonl?key={SECRET}", lambda text: None)


READERS: dict[str, Callable[[str, float], Any]] = {
    "llmsuite": lambda url, seconds: rollout(RolloutServer, url, seconds),
    "vllm": lambda url, seconds: rollout(VllmServer, url, seconds),
    "reward": reward,
    "data": data,
}
"""By name what asks a server, with a deadline in seconds. All raise UserError where its answer is no good."""


def answer(data: Any) -> Liar:
    """A server that gives JSON data, or bytes."""
    return Liar(_whole(data if isinstance(data, bytes) else json.dumps(data).encode()))
