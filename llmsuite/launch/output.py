"""What ranks print goes to files, whose disk may be full: that ends no run."""

from __future__ import annotations

import errno
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_BYTES = 4096


class Output(io.TextIOWrapper):
    """A stream of a rank. What finds no room is lost; it may be kept for the next time."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            if error.errno not in _FULL:
                raise


def write_to(stdout: int, stderr: int) -> None:
    """Let this process print to two descriptors, line by line."""
    sys.stdout, sys.stderr = (
        Output(open(stream, "wb", closefd=False), "utf-8", "replace", line_buffering=True)  # noqa: SIM115
        for stream in (stdout, stderr)
    )


class Room:
    """The disk of the logs, seen from the launcher."""

    def __init__(self, log_dir: Path, write: Callable[[str], None]):
        self._log_dir, self._write, self._is_said = log_dir, write, False

    def look(self) -> None:
        """Say it once when the disk is full: what ranks print, an error too, may not be in their logs then."""
        if not self._is_said and shutil.disk_usage(self._log_dir).free < _LEAST_BYTES:
            self._is_said = True
            self._write(f"{self._log_dir}: its disk is full; what ranks print from here on may be lost\n")
