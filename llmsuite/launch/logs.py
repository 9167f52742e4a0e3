"""The logs of ranks, `workerlog.N`: what a launcher reads of them, and the space that they may take.

A rank writes its log itself, so that nothing is lost when the launcher dies. A rank that prints without end (a library
that warns at each token, a loop in a plugin) would fill the disk, and so end the run with its checkpoints unsaved.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_BYTES = 1 << 30
"""Space of a log on disk, beyond which its middle is left out."""
KEPT_BYTES = 64 << 20
"""Bytes that are kept of its begin, and of its end."""
_MAX_LAG = 16 << 20
"""Unread bytes beyond which `LogReader` leaves some out: the terminal is slower than the rank."""
_END_BYTES = 1 << 20
_NOTE = "\n[{size:,} bytes of this log are left out: it was longer than {most:,}]\n"
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
"""Flags of Linux' fallocate."""


class LogReader:
    """Reads what a log gets, from its present end on."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be opened."""
        self._path = path
        self._file = open(path, "rb")  # noqa: SIM115  (open for the whole run: a user may delete the logs)
        self._file.seek(0, os.SEEK_END)

    def read(self) -> str:
        """Return the text that was added; of very much, the end."""
        unread = os.fstat(self._file.fileno()).st_size - self._file.tell()
        if unread <= _MAX_LAG:
            return self._file.read().decode("utf-8", "replace")
        self._file.seek(-_END_BYTES, os.SEEK_END)
        note = f"\n[{unread - _END_BYTES:,} bytes are left out here; see {self._path}]\n"
        return note + self._file.read().decode("utf-8", "replace")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def log_end(path: Path) -> str:
    """The end of a log, at most 1 MiB; empty if it was deleted."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        return file.read().decode("utf-8", "replace")
    return ""


class LogLimit:
    """Bounds the space of the logs of a machine's ranks, by giving the space of their middle back to the file system.

    The size of a log and the places in it stay as they are: the rank writes on, and who reads it reads on. The middle
    reads as zeros.
    """

    def __init__(self, paths: Sequence[Path], write: Callable[[str], None]) -> None:
        """
        Args:
            paths: the logs.
            write: receives a line when one is too long and nothing can be done.
        """
        self._paths = paths
        self._write = write
        self._is_reported = False

    def check(self) -> None:
        """Leave out the middle of each log that takes more than `MAX_BYTES`."""
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):  # a user may delete the logs
                found = os.stat(path)
                if found.st_blocks * 512 > MAX_BYTES and not self._is_reported:
                    self._cut(path, found.st_size - 2 * KEPT_BYTES)

    def _cut(self, path: Path, size: int) -> None:
        """Give back the space of `size` bytes after the begin of a log."""
        try:
            with open(path, "r+b", buffering=0) as file:
                _punch(file.fileno(), KEPT_BYTES, size)
                os.pwrite(file.fileno(), _NOTE.format(size=size, most=MAX_BYTES).encode(), KEPT_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._is_reported = True
            self._write(f"{path}: takes more than {MAX_BYTES:,} bytes; none can be left out: {error.strerror}\n")


def _punch(descriptor: int, start: int, size: int) -> None:
    """Give back the space of a part of a file. Raises OSError where the system or the file system cannot."""
    if sys.platform != "linux":
        raise OSError(0, "this system has no fallocate")
    libc = ctypes.CDLL(None, use_errno=True)
    offsets = (ctypes.c_longlong(start), ctypes.c_longlong(size))
    if libc.fallocate64(descriptor, _PUNCH_HOLE | _KEEP_SIZE, *offsets):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
