"""Runs a command to its end and keeps a limited part of what it prints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

MAX_BYTES = 1 << 20
"""Bytes of each stream that are kept: one half from its begin, the other from its end."""
MAX_PRINTED_BYTES = 1 << 30
"""Bytes that a command may print in all before it is killed."""
_CHUNK = 1 << 16
_POLL_SECONDS = 0.05
"""Time between two looks at a command that prints nothing: its children may hold its streams open after its end."""
_REST_SECONDS = 1.0
"""Time to read what an ended command has printed: its children may print on."""


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

    What it has started in its session is killed when it has ended. However much it prints, a limited part is kept in
    memory.

    Args:
        command: program and arguments.
        environment: its variables; None for those of this process.
        seconds: time that it may take; None for any.

    Raises:
        CommandTimeout: it took longer, or printed more than `MAX_PRINTED_BYTES`.
        OSError: it cannot be started.
    """
    until = float("inf") if seconds is None else time.monotonic() + seconds
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        kept = _read(process, [process.stdout, process.stderr], until)
    finally:
        # the id of the group is in use as long as the command is not waited for
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        process.stdout.close()
        process.stderr.close()
    output, errors = (each.text() for each in kept)
    return Finished(code, output, errors)


def _read(process: subprocess.Popen[bytes], streams: Sequence[IO[bytes]], until: float) -> list[Kept]:
    """Read the streams of a process until it has ended. Raises CommandTimeout."""
    kept = [Kept() for _ in streams]
    with selectors.DefaultSelector() as selector:
        for stream, mine in zip(streams, kept):
            selector.register(stream, selectors.EVENT_READ, mine)
        rest_until = float("inf")
        while True:
            ready = selector.select(_POLL_SECONDS) if selector.get_map() else []
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                if data:
                    key.data.add(data)
                else:
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if rest_until == float("inf") and _has_ended(process):
                rest_until = now + _REST_SECONDS
            if rest_until < float("inf") and (not ready or now > rest_until):
                return kept
            if not selector.get_map() and rest_until == float("inf"):
                time.sleep(_POLL_SECONDS)  # it has closed its streams
            if now > until:
                raise CommandTimeout("it takes too long")
            if sum(each.size for each in kept) > MAX_PRINTED_BYTES:
                raise CommandTimeout(f"it prints more than {MAX_PRINTED_BYTES:,} bytes")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a process has ended. It is not waited for, so that its id stays in use."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
