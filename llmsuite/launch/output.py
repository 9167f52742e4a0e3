"""Output streams of a run. A full disk, a closed pipe or a closed terminal loses output, and does not end the run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from llmsuite.base.redaction import FilteredStream

_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.EPIPE, errno.EIO)
"""The reader has closed its end: `llmsuite run … | head`, a terminal that was closed."""
_LEAST_BYTES = 4096


class Output(FilteredStream):
    """A stream of a run, with secrets redacted. Text that does not fit on a full disk is lost, unless it is still
    buffered when there is room again."""

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
        """Ignore an error that only loses output, and raise any other. A closed reader is replaced by /dev/null, so
        that later writes do not fail again."""
        if error.errno in _GONE:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        elif error.errno not in _FULL:
            raise error


def write_to(stdout: int, stderr: int) -> None:
    """Redirect stdout and stderr of this process to two descriptors, line-buffered."""
    sys.stdout = _output(stdout, hides_urls=False)
    sys.stderr = _output(stderr, hides_urls=True)


def _output(descriptor: int, hides_urls: bool, encoding: str = "utf-8") -> Output:
    return Output(
        open(descriptor, "wb", closefd=False), hides_urls, encoding=encoding, errors="replace", line_buffering=True
    )


@contextlib.contextmanager
def tolerant_output() -> Iterator[None]:
    """While active, a closed stdout or stderr does not end this process. Streams that have replaced the standard ones,
    as in a notebook, are left unchanged."""
    before = sys.stdout, sys.stderr
    if all(isinstance(stream, FilteredStream) for stream in before) or before == (sys.__stdout__, sys.__stderr__):
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout = _output(1, hides_urls=False, encoding=sys.stdout.encoding)
        sys.stderr = _output(2, hides_urls=True, encoding=sys.stderr.encoding)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


class DiskSpaceMonitor:
    """Watches the disk of the logs, in the launcher."""

    def __init__(self, log_dir: Path, write: Callable[[str], None]):
        self._log_dir = log_dir
        self._write = write
        self._is_reported = False

    def check(self) -> None:
        """Report once that the disk is full: the output of ranks, errors included, may be missing in their logs."""
        with contextlib.suppress(FileNotFoundError):  # the logs were deleted
            if not self._is_reported and shutil.disk_usage(self._log_dir).free < _LEAST_BYTES:
                self._is_reported = True
                self._write(f"{self._log_dir}: its disk is full; output of ranks from here on may be lost\n")
