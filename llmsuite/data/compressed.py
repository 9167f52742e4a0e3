"""Opens files as bytes, compressed or not, with a guard against decompression bombs."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmsuite.base.errors import UserError, reason_of
from llmsuite.base.safe_files import open_regular

PACKED = (".gz", ".zst")
_MAX_RATIO = 100
"""Highest ratio of unpacked to packed bytes. Text is compressed to about a tenth; a bomb to a thousandth."""
_MIN_BUDGET_BYTES = 64 << 20
"""Unpacked bytes that are allowed at any ratio."""
_MIN_ITEM_BYTES = 32
"""Bytes that a row or an object counts for at least: a file of nothing but line ends also unpacks to much work. Values
of a list count their own bytes: padded rows of token ids are mostly commas, and no bomb."""
MAX_LINE_BYTES = 64 << 20
"""Size limit of a line. A file with longer ones is not a file of rows."""


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open the unpacked bytes of a file, and the file itself, whose position shows the progress.

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
            raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error


def read_lines(stream: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number. Raises UserError for one beyond `MAX_LINE_BYTES`."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{path}:{number}: is longer than {MAX_LINE_BYTES >> 20} MiB, so it is no row of data")
        yield number, line


class UnpackGuard:
    """Limit on the bytes that are unpacked from a file."""

    def __init__(self, path: Path):
        self._path = path
        self._done = 0
        self._limit = max(_MIN_BUDGET_BYTES, _MAX_RATIO * path.stat().st_size)

    def add(self, size: int) -> None:
        """Count unpacked bytes. Raises UserError when they are too many."""
        self._done += size
        if self._done > self._limit:
            raise UserError(
                f"{self._path}: unpacks to more than {_MAX_RATIO} times its size, or to more rows or objects than any "
                "text has; if this is intended, unpack it first"
            )


class _Guarded(io.RawIOBase):
    """Unpacked bytes, counted."""

    def __init__(self, plain: Any, path: Path):
        self._plain = plain
        self._guard = UnpackGuard(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._plain.read(len(buffer))
        self._guard.add(max(len(piece), _MIN_ITEM_BYTES * sum(map(piece.count, (b"\n", b"{")))))
        buffer[: len(piece)] = piece
        return len(piece)


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: needs the package zstandard; install it with: pip install zstandard") from error
    return zstandard
