"""Renders untrusted templates in a separate process whose time and memory the kernel limits.

A sandbox keeps a template from the machine, but not from endless work: `range` within `range`, a number to a power, a
text padded to gigabytes. No list of such operations would be complete, and most cannot be interrupted; so the rendering
process may use SECONDS of CPU time for a text and MEMORY bytes in all, and is restarted after the kernel has ended it.
A program has one such process, which starts with the first template and ends with the program.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
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

from llmsuite.data.jinja import TemplateFacts, compiled, template_facts
from llmsuite.data.process_limits import limit_memory, limit_seconds

SECONDS = 2
MEMORY = 1 << 30
MAX_TEXT_BYTES = 128 << 20
"""Size limit of a rendered text."""
_MAX_REASON_CHARS = 1000
_MAX_BATCH = 256
_MAX_BATCH_CHARS = 1 << 20
"""Limits of a request: number of texts, and JSON of their variables, unless one text alone takes more."""
_TEXT = b"T"
_REASON = b"R"
_MARKED = "marked:"
"""Begin of the key of a template that is compiled with `marks_turns`."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from llmsuite.data.rendering import serve; serve({pipe})"


class RenderError(Exception):
    """A template is wrong, or cannot be rendered; the message has the reason."""


def render(source: str, variables: Mapping[str, Any] | None) -> str:
    """Render a template; with `variables` None it is compiled only, and the text is `template_facts` as JSON.

    Args:
        source: the template.
        variables: its variables: values of JSON.

    Raises:
        RenderError: it is no valid Jinja, raises an error, or takes too much time or memory.
    """
    (text,) = render_all(source, [variables])
    if isinstance(text, RenderError):
        raise text
    return text


def read_facts(source: str) -> TemplateFacts:
    """Return the facts of a template. Raises RenderError as `render`."""
    return TemplateFacts(**json.loads(render(source, None)))


def render_all(
    source: str, variables: Sequence[Mapping[str, Any] | None], marks_turns: bool = False
) -> list[str | RenderError]:
    """Return the result or error of `render` for each set of variables; `marks_turns` as in `jinja.compiled`.

    They are sent in few requests: a round trip takes ten times as long as a text.
    """
    return _renderer().render(source, variables, marks_turns)


def end_rendering() -> None:
    """End the rendering process, if this process has started it; the next template starts another."""
    for renderer in _renderers:
        renderer.end()


def serve(pipe: int) -> None:
    """Main function of the rendering process: serve requests until the pipe, a file descriptor, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which closes the pipe
    connection = Connection(pipe)
    templates = dict[str, Any]()
    limit_memory(MEMORY)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the pipe, or was ended meanwhile
        while True:
            request = connection.recv_bytes()
            limit_seconds(SECONDS)
            job = json.loads(request)
            for variables in job["variables"]:
                connection.send_bytes(_limited_reply(job, variables, templates))


def _limited_reply(job: Mapping[str, Any], variables: Mapping[str, Any] | None, templates: dict[str, Any]) -> bytes:
    limit_seconds(SECONDS)
    try:
        return _render_reply(job, variables, templates)
    except MemoryError:
        return _REASON + f"takes more than {MEMORY >> 30} GiB of memory".encode()
    except Exception as error:  # a template is an untrusted program: it can fail in any way
        return _REASON + str(error)[:_MAX_REASON_CHARS].encode("utf-8", "replace")


def _render_reply(job: Mapping[str, Any], variables: Mapping[str, Any] | None, templates: dict[str, Any]) -> bytes:
    key = job["key"]
    if key not in templates:
        source = job["source"]
        templates[key] = compiled(source, key.startswith(_MARKED)), template_facts(source)
    template, facts = templates[key]
    if variables is None:
        return _TEXT + json.dumps(dataclasses.asdict(facts)).encode()
    text = template.render(variables).encode("utf-8", "surrogatepass")
    if len(text) > MAX_TEXT_BYTES:
        return _REASON + f"renders {len(text):,} bytes; a text has at most {MAX_TEXT_BYTES:,}".encode()
    return _TEXT + bytes(text)


@functools.cache
def _key(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


def _parts(variables: Sequence[Mapping[str, Any] | None]) -> Iterator[list[str]]:
    """Yield the variables as JSON, in batches of one request."""
    part = list[str]()
    size = 0
    for each in variables:
        text = json.dumps(each)
        if part and (len(part) == _MAX_BATCH or size + len(text) > _MAX_BATCH_CHARS):
            yield part
            part = []
            size = 0
        part.append(text)
        size += len(text)
    if part:
        yield part


class _Renderer:
    """Client of the rendering process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._compiled: set[str] = set()
        """Keys of the templates that the process has compiled."""

    def render(
        self, source: str, variables: Sequence[Mapping[str, Any] | None], marks_turns: bool
    ) -> list[str | RenderError]:
        """Return the text or error of a template for each set of variables."""
        key = f"{_MARKED if marks_turns else ''}{_key(source)}"
        texts = list[str | RenderError]()
        with self._lock:
            for part in _parts(variables):
                end = len(texts) + len(part)
                # a text that ends the process gets an error; a new process continues with the texts after it
                while len(texts) < end:
                    texts += self._exchange(key, source, part[len(texts) - end :])
        return texts

    def _exchange(self, key: str, source: str, variables: Sequence[str]) -> list[str | RenderError]:
        """Return the texts for variables, as JSON, up to the one that ends the process, if one does."""
        connection = self._connection or self._start()
        texts = list[str | RenderError]()
        source_field = "" if key in self._compiled else f', "source": {json.dumps(source)}'
        try:
            connection.send_bytes(f'{{"key": "{key}"{source_field}, "variables": [{",".join(variables)}]}}'.encode())
            for _ in variables:
                reply: bytes = connection.recv_bytes()
                if reply[:1] == _TEXT:
                    texts.append(reply[1:].decode("utf-8", "surrogatepass"))
                    self._compiled.add(key)
                else:
                    texts.append(RenderError(reply[1:].decode()))
        except (EOFError, ConnectionError):
            texts.append(RenderError(self._ended()))
        except BaseException:
            self.close()  # Ctrl-C: replies that are still to come would be taken for those of the next request
            raise
        return texts

    def _start(self) -> Any:
        here, there = multiprocessing.Pipe()
        try:
            program = _PROGRAM.format(path=sys.path, pipe=there.fileno())
            # a new session: signals of the terminal do not reach it
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
        """Return the reason why the process has ended."""
        assert self._process is not None
        code = self._process.wait()
        self.close()
        if code == -signal.SIGXCPU:
            return f"takes more than {SECONDS} s of the processor"
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended with {status}"

    def end(self) -> None:
        """Call `close` when no request is running."""
        with self._lock:
            self.close()

    def close(self) -> None:
        """End the rendering process, if this process has started it."""
        if self.owner != os.getpid():
            return
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None
        self._compiled.clear()


_renderers: list[_Renderer] = []


def _renderer() -> _Renderer:
    """Return the client of this process. A forked process leaves the one that it has inherited alone."""
    if not _renderers or _renderers[0].owner != os.getpid():
        made = _Renderer()
        atexit.register(made.close)
        _renderers[:] = [made]
    return _renderers[0]
