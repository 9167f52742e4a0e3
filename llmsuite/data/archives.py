"""Archives of strangers, read without unpacking them to disk: .tar, .tar.gz and .zip.

What is read takes time and memory in proportion to the archive, whatever it says of itself: names, sizes, headers and
the number of members are the stranger's.
"""

from __future__ import annotations

import contextlib
import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from llmsuite.errors import UserError
from llmsuite.regular import open_regular

_MOST_RATIO, _ALWAYS_FINE = 100, 64 << 20
_MOST_HEADER = 1 << 20
"""Bytes of what stands in front of a member of a .tar: `tarfile` reads long names and their like into memory."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compression in a .zip: what others unpack to has no bound in the size of the file."""
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError),
    *(RuntimeError, NotImplementedError),  # a .zip with a password, or of a later version
    *(ValueError, OverflowError, LookupError),  # numbers in headers that are none, or are negative
)


def members(archive: Path, is_wanted: Callable[[str], bool] = bool) -> Iterator[tuple[str, bytes]]:
    """Name and content of the regular files of an archive that are wanted. All of its names are checked before the
    first file is read.

    Raises:
        UserError: it is no archive, has a name that leads out of it, a link or a device, or unpacks to far more bytes.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_regular(archive))
            budget = _Budget(archive)
            is_zip = zipfile.is_zipfile(file)
            file.seek(0)
            yield from (_of_zip if is_zip else _of_tar)(archive, file, budget, is_wanted, stack)
    except _DAMAGED as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{archive}: is no whole .tar, .tar.gz or .zip: {why}") from error


class _Budget:
    """The bytes that may still be unpacked."""

    def __init__(self, archive: Path):
        self._archive, self._left = archive, max(_ALWAYS_FINE, _MOST_RATIO * archive.stat().st_size)

    def spend(self, size: int) -> None:
        """Count bytes, before they are unpacked. Raises UserError when they are too many."""
        if size < 0:
            raise UserError(f"{self._archive}: has a member of {size} bytes; it is damaged, or means harm")
        self._left -= size
        if self._left < 0:
            raise UserError(f"{self._archive}: unpacks to more than {_MOST_RATIO} times its size, as no text does")


def _of_zip(
    archive: Path, file: IO[bytes], budget: _Budget, is_wanted: Callable[[str], bool], stack: contextlib.ExitStack
) -> Iterator[tuple[str, bytes]]:
    zipped = stack.enter_context(zipfile.ZipFile(file))
    entries = zipped.infolist()
    for entry in entries:
        _check_name(archive, entry.filename)
        budget.spend(entry.file_size)
        if entry.compress_type not in _METHODS:
            raise UserError(f"{archive}: {entry.filename!r} is compressed as no set of data is; pack it again")
    for entry in entries:
        if not entry.is_dir() and is_wanted(entry.filename):
            yield entry.filename, zipped.read(entry)  # no more than it has said, or BadZipFile


def _of_tar(
    archive: Path, file: IO[bytes], budget: _Budget, is_wanted: Callable[[str], bool], stack: contextlib.ExitStack
) -> Iterator[tuple[str, bytes]]:
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    unpacked = stack.enter_context(gzip.GzipFile(fileobj=file)) if is_packed else file
    plain: Any = _Headers(unpacked, archive, budget)  # no whole file, but all that is asked of one
    tar: Any = stack.enter_context(tarfile.TarFile(fileobj=plain))
    entries = []
    for entry in tar:
        _check_name(archive, entry.name)
        budget.spend(entry.size)
        if entry.issparse() or not (entry.isreg() or entry.isdir()):
            raise UserError(f"{archive}: {entry.name!r} is a link or a device, as no set of data has")
        if entry.isreg() and is_wanted(entry.name):
            entries.append(entry)
        tar.members = []  # it would keep all of them
    plain.is_checked = True
    for entry in entries:
        opened = tar.extractfile(entry)
        assert opened is not None, "a regular file"
        with opened:
            content = opened.read()
        if len(content) != entry.size:
            raise tarfile.ReadError(f"{entry.name!r} is cut short")
        yield entry.name, content


class _Headers:
    """A .tar as `tarfile` reads it, of which no header may be large until all are checked."""

    def __init__(self, plain: Any, archive: Path, budget: _Budget):
        self._plain, self._archive, self._budget = plain, archive, budget
        self.is_checked = False
        self.seek, self.tell = plain.seek, plain.tell

    def read(self, size: int) -> bytes:
        """As of a file."""
        if not self.is_checked:
            if size > _MOST_HEADER:
                raise UserError(f"{self._archive}: has a name or a header of {size:,} bytes, as no set of data has")
            self._budget.spend(max(0, size))
        found: bytes = self._plain.read(size)
        return found


def _check_name(archive: Path, name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name:
        raise UserError(f"{archive}: {name!r} leads out of the archive; nothing was unpacked")
