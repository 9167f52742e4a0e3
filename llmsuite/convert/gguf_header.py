"""What a GGUF file says before its tensors, measured without reading it.

The package gguf makes an array of each number of a field, and believes every count. So the counts are added up first:
they have to fit into the file, and to be as many as a reader gets through.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from llmsuite.errors import UserError
from llmsuite.regular import open_regular

MOST_ITEMS = 1 << 22
"""Fields, tensors and elements of arrays. A vocabulary of 256,000 has less than a million, with its merges."""
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number of each type, as in the specification of the format."""
_DEEPEST = 4
_MOST_DIMS = 8


def check_header(path: Path) -> None:
    """Raises UserError: a file is no GGUF file, ends within its header, or has more in it than is read."""
    try:
        with open_regular(path) as file:
            _Header(path, file).check()
    except OSError as error:
        raise UserError(f"{path}: is not a readable GGUF file: {error.strerror}") from error


class _Header:
    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        self._left = os.fstat(file.fileno()).st_size
        self._items, self._order = 0, "<"

    def check(self) -> None:
        """Read over everything in front of the tensors."""
        if self._bytes(4) != b"GGUF":
            raise self._fault("does not begin with GGUF")
        if self._number("I") & 0xFFFF == 0:  # the version, of the other order of bytes
            self._order = ">"
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        for _ in range(self._counted(num_fields, 8 + 4 + 1)):
            self._skip(self._number("Q"))
            self._value(self._number("I"), 0)
        for _ in range(self._counted(num_tensors, 8 + 4 + 4 + 8)):
            self._skip(self._number("Q"))
            num_dims = self._number("I")
            if num_dims > _MOST_DIMS:
                raise self._fault(f"has a tensor with {num_dims:,} dims")
            self._skip(8 * num_dims + 4 + 8)

    def _value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
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
        """A count of the file, each of whose items takes so many bytes at least."""
        if count * least > self._left:
            raise self._fault(f"says that {count:,} values follow, and has {self._left:,} bytes left")
        self._items += count
        if self._items > MOST_ITEMS:
            raise self._fault(f"has more than {MOST_ITEMS:,} fields, tensors and elements of arrays")
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
