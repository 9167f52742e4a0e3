"""Corpora of token ids on disk: `NAME.bin` and `NAME.idx` in the format of Megatron-LM and PaddleNLP.

`.bin` has the tokens of all sequences one after the other. `.idx` has `MMIDIDX\\0\\0`, version 1 (u64), a code of the
dtype (u8), the number of sequences S (u64), the number of document bounds D + 1 (u64), then S sizes in tokens (i32), S
offsets in bytes (i64), and the D + 1 numbers of the sequences that documents begin with (i64).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import glob
import hashlib
import os
import struct
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import fsync
from llmsuite.base.locks import remove_abandoned
from llmsuite.base.safe_files import exists, open_regular

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
_CHUNK = 1 << 20
_MAX_HASHED_BYTES = 1 << 28


def index_path(given: Path) -> Path:
    """Return the .idx of a corpus that is named by its prefix, its .idx or its .bin."""
    if given.suffix in (".idx", ".bin"):
        return given.with_suffix(".idx")
    return _idx(given)


def _idx(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def _bin(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def token_dtype(vocab_size: int) -> str:
    """Return Megatron-LM's dtype for the ids of a vocabulary."""
    return "<u2" if vocab_size < 65500 else "<i4"


class IndexedCorpus:
    """An indexed corpus, mapped into memory: tokens are read on use."""

    def __init__(self, path: Path):
        """`path` is the .idx. Raises UserError when the two files are not a corpus."""
        self.path = path
        data = path.with_suffix(".bin")
        try:
            with open_regular(path) as file, open_regular(data):
                header = file.read(_HEADER.size)
            size = path.stat().st_size
            self.num_bytes = data.stat().st_size
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise UserError(f"{path}: is no index of a corpus; make one with `llmsuite data index`")
        _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
        if version != 1 or code not in _CODES:
            raise UserError(
                f"{path}: has version {version} and dtype {code}; known are version 1 and tokens of integers"
            )
        if size < _HEADER.size + 12 * num_sequences + 8 * num_bounds or num_bounds < 1:
            raise UserError(f"{path}: is cut short; make it again")
        self.dtype = np.dtype(_CODES[code])
        raw: Any = np.memmap(path, mode="r")
        at = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences])
        self.sizes = np.frombuffer(raw, "<i4", num_sequences, int(at[0]))
        self._offsets = np.frombuffer(raw, "<i8", num_sequences, int(at[1]))
        self.bounds = np.frombuffer(raw, "<i8", num_bounds, int(at[2]))
        """[D + 1]: the number of the first sequence of each document, then the number of sequences."""
        expected = self._total_bytes()
        if expected != self.num_bytes:
            raise UserError(f"{data}: has {self.num_bytes} bytes, {path.name} expects {expected}; make both again")
        if self.bounds[0] != 0 or self.bounds[-1] != num_sequences or _descends(self.bounds):
            raise UserError(f"{path}: its documents are not all of its sequences, in their order")
        if not self.num_bytes:
            raise UserError(f"{data}: has no tokens")
        self.tokens: Any = np.memmap(data, mode="r", dtype=self.dtype)

    @property
    def num_documents(self) -> int:
        return len(self.bounds) - 1

    def _total_bytes(self) -> int:
        """Return the bytes of all sequences. Raises UserError unless each begins where the one before it ends."""
        end = 0
        for first in range(0, len(self.sizes), _CHUNK):
            sizes = self.sizes[first : first + _CHUNK].astype("int64") * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            if (sizes < 0).any() or not np.array_equal(self._offsets[first : first + _CHUNK], ends - sizes):
                raise UserError(f"{self.path}: its sequences do not follow one another; make it again")
            end = int(ends[-1])
        return end

    def first_token(self, document: int) -> int:
        """Return the position in `tokens` where a document begins; for D, the number of tokens."""
        sequence = int(self.bounds[document])
        if sequence < len(self.sizes):
            return int(self._offsets[sequence]) // self.dtype.itemsize
        return len(self.tokens)

    def document(self, number: int) -> np.ndarray:
        """Tokens of a document."""
        return self.tokens[self.first_token(number) : self.first_token(number + 1)]

    def digest(self) -> str:
        """sha256 of the index and of the tokens; beyond 256 MiB, of 256 pieces of 1 MiB spread evenly over them."""
        digest = hashlib.sha256(self.path.read_bytes() + str(self.num_bytes).encode())
        starts = range(0, self.num_bytes, _CHUNK)
        if self.num_bytes > _MAX_HASHED_BYTES:
            count = _MAX_HASHED_BYTES // _CHUNK
            starts = range(0, self.num_bytes - _CHUNK + 1, (self.num_bytes - _CHUNK) // (count - 1))
        with open(self.path.with_suffix(".bin"), "rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(_CHUNK))
        return digest.hexdigest()


def _descends(numbers: np.ndarray) -> bool:
    """Return True if a number is smaller than the one before it. Compares a part at a time to bound the memory."""
    parts = (numbers[first : first + _CHUNK + 1] for first in range(0, len(numbers), _CHUNK))
    return any(bool((part[1:] < part[:-1]).any()) for part in parts)


class CorpusWriter:
    """Writes a corpus, which appears under its name when `commit` returns. Holds 4 bytes a document in memory."""

    def __init__(self, prefix: Path, dtype: str):
        """Raises UserError when the corpus exists, or the directory cannot be written to."""
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._sizes = array.array("i")
        self.num_tokens = 0
        if exists(_idx(prefix)):
            raise UserError(f"{_idx(prefix)} exists; choose another name, or remove it first")
        self._part = {kind: prefix.with_name(f"{prefix.name}.{os.getpid()}.{kind}.tmp") for kind in ("bin", "idx")}
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(prefix.parent.glob(f"{glob.escape(prefix.name)}.*.tmp"))
            self._file: IO[bytes] = open(self._part["bin"], "wb")  # noqa: SIM115  (until it is committed)
            with contextlib.suppress(OSError):  # a file system without locks: leftovers of killed processes stay
                fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        for path in self._part.values():
            path.unlink(missing_ok=True)

    @property
    def num_documents(self) -> int:
        return len(self._sizes)

    def add(self, tokens: bytes, sizes: bytes) -> None:
        """Append documents: the bytes of all their tokens, and of their sizes (i32)."""
        try:
            self._file.write(tokens)
        except OSError as error:
            raise self._error(error) from error
        self._sizes.frombytes(sizes)
        self.num_tokens += len(tokens) // self._dtype.itemsize

    def commit(self) -> None:
        """Flush the files and give them their names. The index comes last: without it there is no corpus."""
        sizes = np.frombuffer(self._sizes, "<i4")
        code = next(code for code, name in _CODES.items() if np.dtype(name) == self._dtype)
        try:
            self._file.close()
            with open(self._part["idx"], "wb") as index:
                index.write(_HEADER.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
                sizes.tofile(index)
                ends = np.cumsum(sizes, dtype="<i8") * self._dtype.itemsize
                np.concatenate([np.zeros(1, "<i8"), ends[:-1]]).tofile(index)
                np.arange(len(sizes) + 1, dtype="<i8").tofile(index)
            for kind, target in (("bin", _bin(self._prefix)), ("idx", _idx(self._prefix))):
                fsync(self._part[kind])  # before the rename, or a crash could leave a name without its bytes
                self._part[kind].rename(target)
            fsync(self._prefix.parent)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> UserError:
        return UserError(f"{self._prefix}: cannot be written: {error.strerror or error}")
