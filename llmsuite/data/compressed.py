"""Files as bytes, compressed or not, with a guard against decompression bombs."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmsuite.errors import UserError
from llmsuite.regular import open_regular

PACKED = (".gz", ".zst")
_MOST_RATIO = 100
"""Text is compressed to about a tenth; a bomb to a thousandth."""
_ALWAYS_FINE = 64 << 20
_ITEM = 32
"""Bytes that a row or an object counts for at least: nothing but ends of lines unpacks to much work, too. Values of a
list count as they are: padded rows of token ids are mostly commas, and no bomb."""
MOST_LINE = 64 << 20
"""Bytes of a line. Longer ones are no row but another kind of file."""


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The unpacked bytes of a file, and the file itself, whose position shows the progress.

    Raises:
        UserError: it cannot be read, is damaged, or unpacks to more than 100 times its size; also while it is read.
    """
    damaged: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)  # EOFError: a .gz that is cut short
    with contextlib.ExitStack() as stack:
        try:
            raw = stack.enter_context(open_regular(path))
            plain: Any = raw
            if path.suffix == ".gz":
                plain = stack.enter_context(gzip.GzipFile(fileobj=raw))
            elif path.suffix == ".zst":
                zstandard = _zstandard(path)
                damaged += (zstandard.ZstdError,)
                plain = stack.enter_context(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
            if plain is not raw:
                plain = io.BufferedReader(_Guarded(plain, path), 1 << 20)
            yield plain, raw
        except damaged as error:
            raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def lines(stream: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with its number. Raises UserError at one beyond MOST_LINE."""
    number = 0
    while line := stream.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise UserError(f"{path}:{number}: is longer than {MOST_LINE >> 20} MiB, so it is no row of data")
        yield number, line


class Guard:
    """A count of what is unpacked of a file."""

    def __init__(self, path: Path):
        self._path, self._done = path, 0
        self._most = max(_ALWAYS_FINE, _MOST_RATIO * path.stat().st_size)

    def add(self, size: int) -> None:
        """Count some bytes. Raises UserError when they are too many."""
        self._done += size
        if self._done > self._most:
            raise UserError(
                f"{self._path}: unpacks to more than {_MOST_RATIO} times its size, or to as many rows or objects as no "
                "text has; if it is meant so, unpack it first"
            )


class _Guarded(io.RawIOBase):
    """Unpacked bytes, counted."""

    def __init__(self, plain: Any, path: Path):
        self._plain, self._guard = plain, Guard(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._plain.read(len(buffer))
        self._guard.add(max(len(piece), _ITEM * sum(map(piece.count, (b"\n", b"{")))))
        buffer[: len(piece)] = piece
        return len(piece)


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: needs the package zstandard; install it with: pip install zstandard") from error
    return zstandard
