"""Rows of files that are larger than what is held in memory, read where they are: by file, first byte and size.

Only JSON Lines can be read like this. Of every other file with rows the cache has a copy of that kind, named by what is
in the file, which several runs share.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmsuite.cache import cache_root, locked
from llmsuite.data.compressed import PACKED
from llmsuite.data.read import KINDS, bare, data_files, raw_rows, spanned_lines, unpacked_suffix
from llmsuite.errors import UserError
from llmsuite.files import sha256_of, temporary_of
from llmsuite.progress import report
from llmsuite.regular import exists, open_regular

MOST_IN_MEMORY = 4 << 20
"""Bytes of files whose rows are held in memory. While they are read they take up to thirty times as many."""
_PACKED_RATIO = 4
"""Text that is compressed, or Parquet, has about so many times its bytes."""

PLACE = np.dtype([("file", "<i4"), ("size", "<i4"), ("start", "<i8")])
"""Where a row is: number of the file, bytes of the row, the first of them."""


def is_large(path: Path) -> bool:
    """Whether the rows of a file, or of all files of a directory, are read where they are."""
    return sum(map(_unpacked_size, data_files(path))) > MOST_IN_MEMORY


def _unpacked_size(file: Path) -> int:
    packed = file.suffix in PACKED or unpacked_suffix(file) == ".parquet"
    try:
        return file.stat().st_size * (_PACKED_RATIO if packed else 1)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error


def state_of(file: Path) -> list[int]:
    """What differs once a file is another one, or was written to: size, and both times."""
    return _state(os.stat(file))


def _state(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def lines_of(path: Path) -> list[Path]:
    """The files of JSON Lines with the rows of a file or directory: the file itself, or a copy. Raises UserError."""
    return [file if is_lines(file) else _copy(file) for file in data_files(path)]


def placed_rows(path: Path) -> Iterator[tuple[str, Any, str | None, tuple[int, int, int]]]:
    """As `raw_rows`, of a file or of all files of a directory, with a PLACE in the files `lines_of` for each row
    without a fault. The places that users are told are those in the original."""
    for number, (file, of_lines) in enumerate(zip(data_files(path), lines_of(path))):
        spanned = spanned_lines(of_lines)
        if file == of_lines:
            for where, raw, fault, (start, size) in spanned:
                yield where, raw, fault, (number, size, start)
            continue
        for where, raw, fault in raw_rows(file):
            start, size = next(spanned)[3] if fault is None else (0, 0)
            yield where, raw, fault, (number, size, start)


class PlacedRows:
    """Rows by number, as their files have them. May be read by several threads."""

    def __init__(self, files: Sequence[Path], places: np.ndarray):
        """
        Args:
            files: of JSON Lines.
            places: PLACE of each row.

        Raises:
            UserError: a file cannot be opened.
        """
        self._paths, self._places = files, places
        self._files: list[IO[bytes]] = []
        for file in files:
            try:
                self._files.append(open_regular(file, buffering=0))
            except OSError as error:
                raise UserError(f"{file}: cannot be read: {error.strerror}") from error
        self._states = [_state(os.fstat(file.fileno())) for file in self._files]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        """Raises UserError when the file has been written to since it was opened."""
        at, size, start = (int(value) for value in self._places[number])
        descriptor = self._files[at].fileno()
        line = os.pread(descriptor, size, start)
        if _state(os.fstat(descriptor)) != self._states[at]:
            raise UserError(f"{self._paths[at]}: was written to while it is read; begin again")
        return json.loads(bare(line, start))


def is_lines(file: Path) -> bool:
    """Whether rows of a file can be read where they are; of others there is a copy as lines."""
    return file.suffix not in PACKED and (file.suffix == ".jsonl" or file.suffix not in KINDS)


def _copy(file: Path) -> Path:
    """The rows of a file without faults as JSON Lines. Of several processes one makes it, and the others wait."""
    target = cache_root() / "rows" / f"{sha256_of(file)}{''.join(file.suffixes[-2:])}.jsonl"
    with locked(target.with_suffix(".lock")):
        if not exists(target):
            report(f"{file}: its rows are copied to JSON Lines in {target.parent}, to read them one by one")
            temporary = temporary_of(target)
            try:
                with open(temporary, "wb") as out:
                    for where, raw, fault in raw_rows(file):
                        if fault is None:
                            out.write(as_line(where, raw))
                temporary.replace(target)
            except OSError as error:
                raise UserError(f"{temporary}: cannot be written: {error.strerror}") from error
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
    return target


def as_line(where: str, raw: Any) -> bytes:
    """A row as a line. Raises UserError when it would be another one when it is read again."""
    try:
        line = json.dumps(raw, allow_nan=False)
        is_same = json.loads(line) == raw
    except (TypeError, ValueError):
        is_same = False
    except RecursionError:
        return b"null\n"  # `Conversion` refuses it
    if not is_same:
        raise UserError(
            f"{where}: has a value that JSON lacks, such as a time, bytes or NaN; a file of more than "
            f"{MOST_IN_MEMORY >> 20} MiB is copied to JSON Lines: leave that column out"
        )
    return line.encode() + b"\n"
