"""Random access to rows on disk, for files that are too large to hold in memory: by file, first byte and size.

Only JSON Lines can be read like this. Any other file of rows is copied to JSON Lines in the cache, under a name made
from its content; runs share the copy.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmsuite.base.cache import cache_root, locked
from llmsuite.base.errors import UserError
from llmsuite.base.files import sha256_of, temporary_path
from llmsuite.base.progress import report
from llmsuite.base.safe_files import exists, open_regular
from llmsuite.data.compressed import PACKED
from llmsuite.data.read import KINDS, data_files, lines_with_offsets, raw_rows, strip_line, unpacked_suffix

MAX_IN_MEMORY_BYTES = 4 << 20
"""Size of files whose rows are held in memory. While they are read they take up to thirty times that."""
_PACKED_RATIO = 4
"""Estimated ratio of unpacked to packed bytes, for compressed files and Parquet."""

ROW_SPAN = np.dtype([("file", "<i4"), ("size", "<i4"), ("start", "<i8"), ("part", "<i4")])
"""Location of a sample: number of the file, size of its row in bytes, offset of the first byte of the row; and its
number among the samples of the row."""


def is_large(path: Path) -> bool:
    """Return True if the rows of a file, or of all files of a directory, are read from disk on access."""
    return sum(map(_unpacked_size, data_files(path))) > MAX_IN_MEMORY_BYTES


def _unpacked_size(file: Path) -> int:
    packed = file.suffix in PACKED or unpacked_suffix(file) == ".parquet"
    try:
        return file.stat().st_size * (_PACKED_RATIO if packed else 1)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error


def file_state(file: Path) -> list[int]:
    """Return values that change when a file is replaced or written to: size, mtime and ctime."""
    return _state(os.stat(file))


def _state(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def jsonl_files(path: Path) -> list[Path]:
    """Return files of JSON Lines with the rows of a file or directory: the file itself, or a copy. Raises UserError."""
    return [file if is_jsonl(file) else _copy(file) for file in data_files(path)]


def scan_rows(path: Path) -> Iterator[tuple[str, Any, str | None, tuple[int, int, int]]]:
    """Yield the rows of a file or of all files of a directory as `raw_rows` does, each with its location.

    The location is the first three fields of a `ROW_SPAN` in the files of `jsonl_files`, for rows without a fault. The
    place for messages is that in the original file.
    """
    for number, (file, jsonl_file) in enumerate(zip(data_files(path), jsonl_files(path))):
        spanned = lines_with_offsets(jsonl_file)
        if file == jsonl_file:
            for where, raw, fault, (start, size) in spanned:
                yield where, raw, fault, (number, size, start)
            continue
        for where, raw, fault in raw_rows(file):
            start, size = next(spanned)[3] if fault is None else (0, 0)
            yield where, raw, fault, (number, size, start)


class DiskRows:
    """Unconverted rows by number. May be read by several threads."""

    def __init__(self, files: Sequence[Path], spans: np.ndarray):
        """
        Args:
            files: of JSON Lines.
            spans: [samples], the `ROW_SPAN` of each.

        Raises:
            UserError: a file cannot be opened.
        """
        self._paths = files
        self._spans = spans
        self._files: list[IO[bytes]] = []
        for file in files:
            try:
                self._files.append(open_regular(file, buffering=0))
            except OSError as error:
                raise UserError(f"{file}: cannot be read: {error.strerror}") from error
        self._states = [_state(os.fstat(file.fileno())) for file in self._files]

    def __len__(self) -> int:
        return len(self._spans)

    def part(self, number: int) -> int:
        """Return the number of a sample among those of its row."""
        return int(self._spans[number]["part"])

    def __getitem__(self, number: int) -> Any:
        """Read a row. Raises UserError when the file has been written to since it was opened."""
        at, size, start, _ = (int(value) for value in self._spans[number])
        descriptor = self._files[at].fileno()
        line = os.pread(descriptor, size, start)
        if _state(os.fstat(descriptor)) != self._states[at]:
            raise UserError(f"{self._paths[at]}: was written to while it was being read; start again")
        return json.loads(strip_line(line, start))


def is_jsonl(file: Path) -> bool:
    """Return True if the rows of a file can be read by their offset; other files are copied to JSON Lines."""
    return file.suffix not in PACKED and (file.suffix == ".jsonl" or file.suffix not in KINDS)


def _copy(file: Path) -> Path:
    """Copy the rows without faults to JSON Lines in the cache. Of several processes one does it, the others wait."""
    target = cache_root() / "rows" / f"{sha256_of(file)}{''.join(file.suffixes[-2:])}.jsonl"
    with locked(target.with_suffix(".lock")):
        if not exists(target):
            report(f"{file}: its rows are copied to JSON Lines in {target.parent}, to read them one by one")
            temporary = temporary_path(target)
            try:
                with open(temporary, "wb") as out:
                    for where, raw, fault in raw_rows(file):
                        if fault is None:
                            out.write(to_jsonl_line(where, raw))
                temporary.replace(target)  # atomic: other processes see no copy, or all of it
            except OSError as error:
                raise UserError(f"{temporary}: cannot be written: {error.strerror}") from error
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
    return target


def to_jsonl_line(where: str, raw: Any) -> bytes:
    """Return a row as a line. Raises UserError if reading it back would give another row."""
    try:
        line = json.dumps(raw, allow_nan=False)
        is_same = json.loads(line) == raw
    except (TypeError, ValueError):
        is_same = False
    except RecursionError:
        return b"null\n"  # `RowConverter` refuses it
    if not is_same:
        raise UserError(
            f"{where}: has a value that JSON lacks, such as a time, bytes or NaN; a file of more than "
            f"{MAX_IN_MEMORY_BYTES >> 20} MiB is copied to JSON Lines: leave that column out"
        )
    return line.encode() + b"\n"
