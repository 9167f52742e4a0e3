"""Templates of strangers, rendered by a process of their own whose time and memory the kernel limits.

A sandbox keeps a template from the machine, but not from work without end: `range` within `range`, a number to a power,
a text of a width of gigabytes. No list of such operations would be complete, and most cannot be interrupted; so the
process that renders may use SECONDS of the processor for a text and MEMORY bytes in all, and is started again after it
was ended. Within a program there is one, started at the first template, that ends with it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from llmsuite.data.jinja import environment
from llmsuite.data.limits import limit_memory, limit_seconds

SECONDS = 2
MEMORY = 1 << 30
MOST_TEXT = 128 << 20
"""Bytes of a text."""
_MOST_REASON = 1000
_TEXT, _REASON, _UNKNOWN = b"T", b"R", b"U"
_PROGRAM = "import sys; sys.path[:] = {path!r}; from llmsuite.data.rendering import serve; serve({pipe})"


class Refused(Exception):
    """The template is wrong, or its text cannot be made; the message says why."""


def render(source: str, variables: Mapping[str, Any] | None) -> str:
    """The text of a template; with `variables` None it is compiled only.

    Args:
        source: the template.
        variables: what it may name: values of JSON.

    Raises:
        Refused: it is no valid Jinja, raises an error, or takes too much time or memory.
    """
    return _renderer().ask(source, variables)


def serve(pipe: int) -> None:
    """Render until the other end closes: what the process of the templates does. `pipe` is a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it as the end of the pipe
    connection, compiled = Connection(pipe), dict[str, Any]()
    limit_memory(MEMORY)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        limit_seconds(SECONDS)
        try:
            reply = _answer(json.loads(request), compiled)
        except MemoryError:
            reply = _REASON + f"takes more than {MEMORY >> 30} GiB of memory".encode()
        except Exception as error:  # a template is a stranger's program: it can fail in any way
            reply = _REASON + str(error)[:_MOST_REASON].encode("utf-8", "replace")
        connection.send_bytes(reply)


def _answer(request: Mapping[str, Any], compiled: dict[str, Any]) -> bytes:
    key = request["key"]
    if "source" in request:
        compiled[key] = environment().from_string(request["source"])
    if key not in compiled:
        return _UNKNOWN
    if request["variables"] is None:
        return _TEXT
    text = compiled[key].render(request["variables"]).encode("utf-8", "surrogatepass")
    if len(text) > MOST_TEXT:
        return _REASON + f"renders {len(text):,} bytes; a text has at most {MOST_TEXT:,}".encode()
    return _TEXT + bytes(text)


@functools.cache
def _key(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


class _Renderer:
    """The process of the templates, as seen by the program that uses them."""

    def __init__(self) -> None:
        self.owner, self._lock = os.getpid(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None

    def ask(self, source: str, variables: Mapping[str, Any] | None) -> str:
        """See `render`."""
        request: Mapping[str, Any] = {"key": _key(source), "variables": variables}
        with self._lock:
            reply = self._exchange(request)
            if reply == _UNKNOWN:
                reply = self._exchange({**request, "source": source})
        if reply[:1] == _TEXT:
            return reply[1:].decode("utf-8", "surrogatepass")
        raise Refused(reply[1:].decode())

    def _exchange(self, request: Mapping[str, Any]) -> bytes:
        connection = self._connection or self._start()
        try:
            connection.send_bytes(json.dumps(request).encode())
            reply: bytes = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return _REASON + self._ended().encode()
        except BaseException:
            self.close()  # it is in the middle of something: Ctrl-C
            raise
        return reply

    def _start(self) -> Any:
        here, there = multiprocessing.Pipe()
        try:
            program = _PROGRAM.format(path=sys.path, pipe=there.fileno())
            # a session of its own: a signal of the terminal is none of its business
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        finally:
            there.close()
        self._connection = here
        return here

    def _ended(self) -> str:
        """Why the process has ended by itself."""
        assert self._process is not None
        code = self._process.wait()
        self.close()
        if code == -signal.SIGXCPU:
            return f"takes more than {SECONDS} s of the processor"
        return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"

    def close(self) -> None:
        """End the process, if it is that of this one."""
        if self.owner != os.getpid():
            return
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None


_renderers: list[_Renderer] = []


def _renderer() -> _Renderer:
    """That of this process: a fork has inherited that of another one, and leaves it alone."""
    if not _renderers or _renderers[0].owner != os.getpid():
        made = _Renderer()
        atexit.register(made.close)
        _renderers[:] = [made]
    return _renderers[0]
