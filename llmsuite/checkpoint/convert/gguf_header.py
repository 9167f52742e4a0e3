"""Checks of the header of a GGUF file, without building its content in memory.

The package gguf makes an array of each number of a field, and trusts every count. So the counts are checked first: they
have to fit into the file, and their total must be small enough for the reader.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import open_regular

MAX_ITEMS = 1 << 22
"""Most fields, tensors and elements of arrays. A vocabulary of 256,000 has less than a million, with its merges."""
_STRING = 8
_ARRAY = 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number of each type, as in the specification of the format."""
_DEEPEST = 4
_MAX_DIMS = 8


def check_header(path: Path) -> None:
    """Raise UserError for a file that is no GGUF file, ends within its header, or has too many items in it."""
    try:
        with open_regular(path) as file:
            _Header(path, file).check()
    except OSError as error:
        raise UserError(f"{path}: is not a readable GGUF file: {error.strerror}") from error


class _Header:
    def __init__(self, path: Path, file: BinaryIO):
        self._path = path
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        self._items = 0
        self._order = "<"

    def check(self) -> None:
        """Check everything in front of the tensors."""
        if self._bytes(4) != b"GGUF":
            raise self._fault("does not begin with GGUF")
        if self._number("I") & 0xFFFF == 0:  # the version: the file has the other byte order
            self._order = ">"
        num_tensors = self._number("Q")
        num_fields = self._number("Q")
        for _ in range(self._counted(num_fields, 8 + 4 + 1)):
            self._skip(self._number("Q"))
            self._value(self._number("I"), 0)
        for _ in range(self._counted(num_tensors, 8 + 4 + 4 + 8)):
            self._skip(self._number("Q"))
            num_dims = self._number("I")
            if num_dims > _MAX_DIMS:
                raise self._fault(f"has a tensor with {num_dims:,} dims")
            self._skip(8 * num_dims + 4 + 8)

    def _value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            kind = self._number("I")
            count = self._number("Q")
            if depth == _DEEPEST:
                raise self._fault("has arrays in arrays in arrays")
            if kind in _SIZES:
                self._skip(self._counted(count, _SIZES[kind]) * _SIZES[kind])
                return
            for _ in range(self._counted(count, 8)):
                self._value(kind, depth + 1)
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise self._fault(f"has a field of type {kind}")

    def _counted(self, count: int, least: int) -> int:
        """Check a count of the file; each of its items takes at least `least` bytes."""
        if count * least > self._left:
            raise self._fault(f"says that {count:,} values follow, and has {self._left:,} bytes left")
        self._items += count
        if self._items > MAX_ITEMS:
            raise self._fault(f"has more than {MAX_ITEMS:,} fields, tensors and elements of arrays")
        return count

    def _number(self, code: str) -> int:
        form = struct.Struct(self._order + code)
        (found,) = form.unpack(self._bytes(form.size))
        return int(found)

    def _bytes(self, size: int) -> bytes:
        self._take(size)
        found = self._file.read(size)
        if len(found) < size:
            raise self._fault("ends within its header")
        return found

    def _skip(self, size: int) -> None:
        self._take(size)
        self._file.seek(size, os.SEEK_CUR)

    def _take(self, size: int) -> None:
        if size > self._left:
            raise self._fault("ends within its header")
        self._left -= size

    def _fault(self, why: str) -> UserError:
        return UserError(f"{self._path}: is not a readable GGUF file: it {why}")
