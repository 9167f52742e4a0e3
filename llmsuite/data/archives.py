"""Reads untrusted archives without unpacking them to disk: .tar, .tar.gz and .zip.

Reading takes time and memory in proportion to the size of the archive, whatever its headers claim: names, sizes,
headers and the number of members come from an untrusted author.
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

from llmsuite.base.errors import UserError, reason_of
from llmsuite.base.safe_files import open_regular

_MAX_RATIO = 100
"""Highest ratio of unpacked to packed bytes."""
_MIN_BUDGET_BYTES = 64 << 20
"""Unpacked bytes that are allowed at any ratio."""
_MAX_HEADER_BYTES = 1 << 20
"""Size limit of a header in a .tar: `tarfile` reads long names and similar fields into memory."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Accepted compression methods of a .zip. The others have no upper bound of unpacked bytes per packed byte."""
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError),
    *(RuntimeError, NotImplementedError),  # a .zip with a password, or of a later version
    *(ValueError, OverflowError, LookupError),  # numbers in headers that are none, or are negative
)


def read_members(archive: Path, is_selected: Callable[[str], bool] = bool) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the selected regular files of an archive.

    All names are checked before the first file is read.

    Args:
        archive: path of the file.
        is_selected: returns True for the names to read; by default all.

    Raises:
        UserError: it is no archive, has a name that leads out of it, a link or a device, or unpacks to far more bytes.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_regular(archive))
            budget = _Budget(archive)
            is_zip = zipfile.is_zipfile(file)
            file.seek(0)
            read = _read_zip if is_zip else _read_tar
            yield from read(archive, file, budget, is_selected, stack)
    except _DAMAGED as error:
        raise UserError(f"{archive}: is not a complete .tar, .tar.gz or .zip: {reason_of(error)}") from error


class _Budget:
    """The bytes that may still be unpacked."""

    def __init__(self, archive: Path):
        self._archive = archive
        self._left = max(_MIN_BUDGET_BYTES, _MAX_RATIO * archive.stat().st_size)

    def spend(self, size: int) -> None:
        """Count bytes, before they are unpacked. Raises UserError when they are too many."""
        if size < 0:
            raise UserError(f"{self._archive}: has a member of {size} bytes; it is damaged or malicious")
        self._left -= size
        if self._left < 0:
            raise UserError(f"{self._archive}: unpacks to more than {_MAX_RATIO} times its size, which no text does")


def _read_zip(
    archive: Path, file: IO[bytes], budget: _Budget, is_selected: Callable[[str], bool], stack: contextlib.ExitStack
) -> Iterator[tuple[str, bytes]]:
    zipped = stack.enter_context(zipfile.ZipFile(file))
    entries = zipped.infolist()
    for entry in entries:
        _check_name(archive, entry.filename)
        budget.spend(entry.file_size)
        if entry.compress_type not in _METHODS:
            raise UserError(f"{archive}: {entry.filename!r} has an unsupported compression method; pack it again")
    for entry in entries:
        if not entry.is_dir() and is_selected(entry.filename):
            yield entry.filename, zipped.read(entry)  # at most the size in its header, else BadZipFile


def _read_tar(
    archive: Path, file: IO[bytes], budget: _Budget, is_selected: Callable[[str], bool], stack: contextlib.ExitStack
) -> Iterator[tuple[str, bytes]]:
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    unpacked = stack.enter_context(gzip.GzipFile(fileobj=file)) if is_packed else file
    plain: Any = _HeaderGuard(unpacked, archive, budget)  # not a full file object, but has all that TarFile calls
    tar: Any = stack.enter_context(tarfile.TarFile(fileobj=plain))
    entries = []
    for entry in tar:
        _check_name(archive, entry.name)
        budget.spend(entry.size)
        if entry.issparse() or not (entry.isreg() or entry.isdir()):
            raise UserError(f"{archive}: {entry.name!r} is a link or a device, which no data set has")
        if entry.isreg() and is_selected(entry.name):
            entries.append(entry)
        tar.members = []  # TarFile keeps every member it has read: memory would grow with their number
    plain.is_checked = True
    for entry in entries:
        opened = tar.extractfile(entry)
        assert opened is not None, "a regular file"
        with opened:
            content = opened.read()
        if len(content) != entry.size:
            raise tarfile.ReadError(f"{entry.name!r} is cut short")
        yield entry.name, content


class _HeaderGuard:
    """File object for `tarfile` that refuses large reads until all headers are checked."""

    def __init__(self, plain: Any, archive: Path, budget: _Budget):
        self._plain = plain
        self._archive = archive
        self._budget = budget
        self.is_checked = False
        self.seek = plain.seek
        self.tell = plain.tell

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes. Raises UserError for a header that is too large."""
        if not self.is_checked:
            if size > _MAX_HEADER_BYTES:
                raise UserError(f"{self._archive}: has a name or a header of {size:,} bytes, which no data set has")
            self._budget.spend(max(0, size))
        found: bytes = self._plain.read(size)
        return found


def _check_name(archive: Path, name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name:
        raise UserError(f"{archive}: {name!r} leads out of the archive; nothing was unpacked")
