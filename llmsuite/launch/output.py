"""What a run prints goes to files, whose disk may be full, and to pipes and terminals that may go: that ends no run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from llmsuite.shown import SECRETS, Shown, redacted

_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.EPIPE, errno.EIO)
"""Nobody reads any more: `llmsuite run … | head`, a terminal that was closed."""
_LEAST_BYTES = 4096


class Output(Shown):
    """A stream of a run, without secrets. What finds no room is lost; it may be kept for the next time."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Raise what is no loss of output alone."""
        if error.errno in _GONE:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        elif error.errno not in _FULL:
            raise error


def write_to(stdout: int, stderr: int) -> None:
    """Let this process print to two descriptors, line by line."""
    sys.stdout, sys.stderr = _output(stdout, SECRETS.hidden), _output(stderr, redacted)


def _output(descriptor: int, shown: Callable[[str], str], encoding: str = "utf-8") -> Output:
    return Output(
        open(descriptor, "wb", closefd=False), shown, encoding=encoding, errors="replace", line_buffering=True
    )


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """While active, this process goes on when nobody reads what it prints. Streams that somebody has put in place of
    the standard ones are left alone."""
    before = sys.stdout, sys.stderr
    if all(isinstance(stream, Shown) for stream in before) or before == (sys.__stdout__, sys.__stderr__):
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout = _output(1, SECRETS.hidden, sys.stdout.encoding)
        sys.stderr = _output(2, redacted, sys.stderr.encoding)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


class Room:
    """The disk of the logs, seen from the launcher."""

    def __init__(self, log_dir: Path, write: Callable[[str], None]):
        self._log_dir, self._write, self._is_said = log_dir, write, False

    def look(self) -> None:
        """Say it once when the disk is full: what ranks print, an error too, may not be in their logs then."""
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted the logs
            if not self._is_said and shutil.disk_usage(self._log_dir).free < _LEAST_BYTES:
                self._is_said = True
                self._write(f"{self._log_dir}: its disk is full; what ranks print from here on may be lost\n")
