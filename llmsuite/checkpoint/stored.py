"""Tensors in a safetensors file: the header is read and checked on opening, values on demand.

The package safetensors maps the full file to read one tensor of it. Here only the requested bytes are mapped or read,
so that files may be larger than the memory limit of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import open_regular
from llmsuite.base.strict_json import parse_json

INT8 = "int8"
FP8 = "float8_e4m3fn"
UINT8 = "uint8"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
# of quantised matrices with tensors of scales, see `int8.py`, `fp8.py` and `mxfp4.py`
DTYPES |= {"I8": INT8, "F8_E4M3": FP8, "U8": UINT8}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_OTHER_SIZES = {
    "BOOL": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "U64": 8,
    "C64": 8,
}
_MAX_HEADER_BYTES = 100_000_000  # the same limit as in the package safetensors
_CHUNK = 1 << 20
_MAX_DIMS = 8
_MAX_DIM_SIZE = 1 << 40
"""Limits of a shape: if one size is 0, the number of bytes does not limit the others."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    name: str
    path: Path
    code: str
    """Dtype by its name in the header."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    size: int
    """Size in bytes."""
    sha256: str | None = None
    """Digest of the values by the manifest; None if it is not known."""

    @property
    def dtype(self) -> str:
        """NumPy's name of the dtype. Raises UserError for one that no parameter has."""
        if self.code not in DTYPES:
            raise UserError(f"{self.path}: {self.name!r} has dtype {self.code}; supported: {', '.join(DTYPES)}")
        return DTYPES[self.code]

    def chunks(self) -> Iterator[memoryview]:
        """Yield all of its bytes, 1 MB at a time. Each chunk is overwritten by the next one.

        Raises:
            UserError: the file cannot be read, or has become shorter.
        """
        buffer = memoryview(bytearray(min(_CHUNK, self.size)))
        with _readable(self.path), open_regular(self.path, buffering=0) as file:
            at = self.start
            end = self.start + self.size
            while at < end:
                part = buffer[: end - at]
                filled = 0
                while filled < len(part):
                    count = os.preadv(file.fileno(), [part[filled:]], at + filled)
                    if not count:
                        raise UserError(f"{self.path}: ends at byte {at + filled:,}, within {self.name!r}")
                    filled += count
                yield part
                at += len(part)

    def read(self, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read the values, or those of a slice (one slice a dim, none empty). Raises as `chunks`."""
        dtype = np.dtype(self.dtype)
        # a slice of later dims is scattered over the file: map it, so that only its pages are read
        if index and self.size and any(s.indices(n)[:2] != (0, n) for s, n in zip(index[1:], self.shape[1:])):
            with _readable(self.path), open_regular(self.path) as file:
                mapped: Any = np.memmap(file, "uint8", "r", self.start, (self.size,))
                return np.array(mapped.view(dtype).reshape(self.shape)[tuple(index)])
        first, last, _ = index[0].indices(self.shape[0]) if index else (0, 0, 1)
        shape = (last - first, *self.shape[1:]) if index else self.shape
        row = math.prod(self.shape[1:]) * dtype.itemsize
        part = dataclasses.replace(self, start=self.start + first * row, size=math.prod(shape) * dtype.itemsize)
        result = np.empty(shape, dtype)
        target = memoryview(result.reshape(-1).view("uint8"))  # type: ignore[arg-type]
        at = 0
        for chunk in part.chunks():
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
        return result

    def check(self) -> None:
        """Compare the values with their sha256 in the manifest. Raises UserError if they differ."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        self.compare(digest.hexdigest())

    def compare(self, sha256: str) -> None:
        """Compare a digest of the values with that in the manifest. Raises UserError if they differ."""
        if self.sha256 not in (None, sha256):
            raise UserError(
                f"{self.path}: {self.name!r} does not have the sha256 in its manifest.json: the file is damaged; "
                "nothing was written"
            )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file, in the order of the header, without their values.

    Raises:
        UserError: it cannot be read, the header is invalid, or it does not fit the file.
    """
    with _readable(path), open_regular(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _unreadable(path, "it ends within its header")
        text = file.read(length)
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        found = [_entry(path, 8 + length, name, entry) for name, entry in header.items()]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _unreadable(path, f"its header is not valid: {error!r}") from error
    end = 8 + length
    for tensor in sorted(found, key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != end:
            raise _unreadable(path, f"{tensor.name!r} does not begin where the tensor before it ends")
        end += tensor.size
    if end != size:
        raise _unreadable(path, f"by its header it has {end:,} bytes, there are {size:,}")
    return {tensor.name: tensor for tensor in found}


def _entry(path: Path, data: int, name: str, entry: Any) -> StoredTensor:
    """Return a tensor of a header. Damaged JSON raises one of several built-in errors, which the caller catches."""
    code = entry["dtype"]
    shape = entry["shape"]
    (begin, end) = entry["data_offsets"]
    if not isinstance(code, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name!r} has no dtype, shape and offsets")
    if len(shape) > _MAX_DIMS or max(shape, default=0) > _MAX_DIM_SIZE:
        raise ValueError(f"{name!r} has the shape {reprlib.repr(shape)}; at most {_MAX_DIMS} dims are read")
    itemsize = np.dtype(DTYPES[code]).itemsize if code in DTYPES else _OTHER_SIZES.get(code)
    if end < begin or (itemsize is not None and math.prod(shape) * itemsize != end - begin):
        raise ValueError(f"{name!r} is {shape} of {code}, which are not {end - begin:,} bytes")
    return StoredTensor(name, path, code, tuple(shape), data + begin, end - begin)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:  # a name that no file can have
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(f"{path}: is not a readable safetensors file: {why}")
