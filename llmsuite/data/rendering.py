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
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from llmsuite.data.jinja import environment
from llmsuite.data.limits import limit_memory, limit_seconds

SECONDS = 2
MEMORY = 1 << 30
MOST_TEXT = 128 << 20
"""Bytes of a text."""
_MOST_REASON = 1000
_MOST_ASKED, _MOST_BYTES = 256, 1 << 20
"""Texts that are asked for at a time, and what their variables take as JSON, unless one alone takes more."""
_TEXT, _REASON = b"T", b"R"
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
    (text,) = render_all(source, [variables])
    if isinstance(text, Refused):
        raise text
    return text


def render_all(source: str, variables: Sequence[Mapping[str, Any] | None]) -> list[str | Refused]:
    """What `render` returns or raises for each. Many texts at a time: waiting for the other process takes ten times as
    long as a text."""
    return _renderer().ask(source, variables)


def end_rendering() -> None:
    """End the process of the templates, if this one has started it; the next template starts another."""
    for renderer in _renderers:
        renderer.end()


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
        asked = json.loads(request)
        for variables in asked["variables"]:
            limit_seconds(SECONDS)
            try:
                reply = _answer(asked, variables, compiled)
            except MemoryError:
                reply = _REASON + f"takes more than {MEMORY >> 30} GiB of memory".encode()
            except Exception as error:  # a template is a stranger's program: it can fail in any way
                reply = _REASON + str(error)[:_MOST_REASON].encode("utf-8", "replace")
            connection.send_bytes(reply)


def _answer(asked: Mapping[str, Any], variables: Mapping[str, Any] | None, compiled: dict[str, Any]) -> bytes:
    key = asked["key"]
    if key not in compiled:
        compiled[key] = environment().from_string(asked["source"])
    if variables is None:
        return _TEXT
    text = compiled[key].render(variables).encode("utf-8", "surrogatepass")
    if len(text) > MOST_TEXT:
        return _REASON + f"renders {len(text):,} bytes; a text has at most {MOST_TEXT:,}".encode()
    return _TEXT + bytes(text)


@functools.cache
def _key(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


def _parts(variables: Sequence[Mapping[str, Any] | None]) -> Iterator[list[str]]:
    """As JSON, so many at a time as are asked for together."""
    part, size = list[str](), 0
    for each in variables:
        text = json.dumps(each)
        if part and (len(part) == _MOST_ASKED or size + len(text) > _MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


class _Renderer:
    """The process of the templates, as seen by the program that uses them."""

    def __init__(self) -> None:
        self.owner, self._lock = os.getpid(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._known: set[str] = set()
        """Keys of the templates that the process has compiled."""

    def ask(self, source: str, variables: Sequence[Mapping[str, Any] | None]) -> list[str | Refused]:
        """See `render_all`."""
        key, texts = _key(source), list[str | Refused]()
        with self._lock:
            for part in _parts(variables):
                end = len(texts) + len(part)
                while len(texts) < end:  # a text that ended the process is told; another process goes on behind it
                    texts += self._exchange(key, source, part[len(texts) - end :])
        return texts

    def _exchange(self, key: str, source: str, variables: Sequence[str]) -> list[str | Refused]:
        """Texts for variables, as JSON, up to the one that ends the process, if one does."""
        connection, texts = self._connection or self._start(), list[str | Refused]()
        told = "" if key in self._known else f', "source": {json.dumps(source)}'
        try:
            connection.send_bytes(f'{{"key": "{key}"{told}, "variables": [{",".join(variables)}]}}'.encode())
            for _ in variables:
                reply: bytes = connection.recv_bytes()
                is_text = reply[:1] == _TEXT
                texts.append(reply[1:].decode("utf-8", "surrogatepass") if is_text else Refused(reply[1:].decode()))
                if is_text:
                    self._known.add(key)
        except (EOFError, ConnectionError):
            texts.append(Refused(self._ended()))
        except BaseException:
            self.close()  # it is in the middle of something: Ctrl-C
            raise
        return texts

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

    def end(self) -> None:
        """`close`, once no text is asked for."""
        with self._lock:
            self.close()

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
        self._known.clear()


_renderers: list[_Renderer] = []


def _renderer() -> _Renderer:
    """That of this process: a fork has inherited that of another one, and leaves it alone."""
    if not _renderers or _renderers[0].owner != os.getpid():
        made = _Renderer()
        atexit.register(made.close)
        _renderers[:] = [made]
    return _renderers[0]
