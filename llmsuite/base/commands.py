"""Runs a command to its end and keeps a limited part of what it prints."""

from __future__ import annotations

import dataclasses
import errno
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from llmsuite.base.supervisor import SupervisedProcess

MAX_BYTES = 1 << 20
"""Bytes of each stream that are kept: one half from its begin, the other from its end."""
MAX_PRINTED_BYTES = 1 << 30
"""Bytes that a command may print in all before it is killed."""
_CHUNK = 1 << 16
_POLL_SECONDS = 0.05
"""Time between two looks at a command that prints nothing."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    """Exit code; negative for the signal that has ended it."""
    output: str
    """Standard output, with a note where a part is left out."""
    errors: str
    """Standard error, likewise."""


class CommandTimeout(Exception):
    """A command took too long, or printed too much, and was killed."""


class Kept:
    """The begin and the end of an output, of `MAX_BYTES` in all."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._begin = bytearray()
        self._end = bytearray()
        self.size = 0
        """Bytes that were added."""

    def add(self, data: bytes) -> None:
        """Add what was printed next."""
        self.size += len(data)
        room = MAX_BYTES // 2 - len(self._begin)
        self._begin += data[:room]
        self._end += data[room:]
        if len(self._end) > MAX_BYTES:
            del self._end[: -MAX_BYTES // 2]

    def text(self) -> str:
        """Return what is kept, with a note where a part is left out."""
        end = bytes(self._end[-MAX_BYTES // 2 :])
        left_out = self.size - len(self._begin) - len(end)
        note = f"\n[{left_out:,} bytes are left out]\n".encode() if left_out else b""
        return (bytes(self._begin) + note + end).decode("utf-8", "replace")


def run_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None, seconds: float | None = None
) -> Finished:
    """Run a command, without input and in a session of its own, and wait until it has ended.

    What it has started is killed when it has ended, and all of them when this process ends, even by SIGKILL. However
    much it prints, a limited part is kept in memory.

    Args:
        command: program and arguments.
        environment: its variables; None for those of this process.
        seconds: time that it may take; None for any.

    Raises:
        CommandTimeout: it took longer, or printed more than `MAX_PRINTED_BYTES`.
        OSError: there is no such program.
    """
    until = float("inf") if seconds is None else time.monotonic() + seconds
    path = None if environment is None else environment.get("PATH")
    if shutil.which(command[0], path=path) is None:  # else a supervisor would be started, and fail to start it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    process = SupervisedProcess(command, output=subprocess.PIPE, environment=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            kept = _read(process, [process.stdout, process.stderr], until)
        finally:
            process.end()
        code = process.poll()
    assert code is not None
    output, errors = (each.text() for each in kept)
    return Finished(code, output, errors)


def _read(process: SupervisedProcess, streams: Sequence[IO[bytes]], until: float) -> list[Kept]:
    """Read the streams of a process until it has ended, with all that it has started. Raises CommandTimeout."""
    kept = [Kept() for _ in streams]
    with selectors.DefaultSelector() as selector:
        for stream, mine in zip(streams, kept):
            selector.register(stream, selectors.EVENT_READ, mine)
        has_ended = False
        while True:
            ready = selector.select(_POLL_SECONDS) if selector.get_map() else []
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                if data:
                    key.data.add(data)
                else:
                    selector.unregister(key.fileobj)
            if has_ended and not ready:
                return kept
            has_ended = process.poll() is not None
            if not selector.get_map() and not has_ended:
                time.sleep(_POLL_SECONDS)
            if time.monotonic() > until:
                raise CommandTimeout("it takes too long")
            if sum(each.size for each in kept) > MAX_PRINTED_BYTES:
                raise CommandTimeout(f"it prints more than {MAX_PRINTED_BYTES:,} bytes")
