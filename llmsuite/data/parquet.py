"""Reads Parquet files with the package pyarrow.

Parquet stores a repeated value once, and its index each time: 2 kB of a file can stand for gigabytes of text. So texts
are read as indices into a dictionary, and the size of rows is computed before they are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError, reason_of
from llmsuite.base.safe_files import open_regular
from llmsuite.data.compressed import MAX_LINE_BYTES, UnpackGuard

_ROWS = 1024
"""Rows of a batch, unless they are large."""
_TEXTS = ("string", "large_string", "binary", "large_binary")


class ParquetRows:
    """The rows of an open Parquet file."""

    def __init__(self, path: Path, opened: Any):
        """
        Args:
            path: for messages.
            opened: the file.

        Raises:
            UserError: by its footer it unpacks to far more than its bytes.
        """
        import pyarrow.parquet

        plain = pyarrow.parquet.ParquetFile(opened)
        self._path = path
        self._guard = UnpackGuard(path)
        metadata = plain.metadata
        self._schema = plain.schema_arrow
        self.types = {field.name: str(field.type) for field in self._schema}
        """Arrow's name of the type of each column."""
        self.num_rows: int = metadata.num_rows
        """Number of rows by the footer."""
        chunks = [
            metadata.row_group(group).column(column)
            for group in range(metadata.num_row_groups)
            for column in range(metadata.num_columns)
        ]
        UnpackGuard(path).add(sum(chunk.total_uncompressed_size for chunk in chunks))
        UnpackGuard(path).add(sum(chunk.num_values for chunk in chunks))  # many values may take no bytes
        leaves = [plain.schema.column(number) for number in range(len(plain.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        self._file = pyarrow.parquet.ParquetFile(opened, metadata=metadata, read_dictionary=texts)

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield each row, with some columns or all. Raises UserError for one that is too large or no valid text."""
        import pyarrow

        done = 0
        for batch in self._file.iter_batches(batch_size=_ROWS, columns=columns):
            schema = pyarrow.schema([self._schema.field(name) for name in batch.schema.names])
            for part in self._parts(batch, done):
                try:
                    rows = part.cast(schema).to_pylist()  # faster for texts than for dictionary indices
                except (ValueError, OverflowError) as error:  # not UTF-8, or a time that Python cannot represent
                    raise UserError(f"{self._path}: row {done + 1} or a later one cannot be read: {error}") from error
                yield from rows
                done += len(rows)

    def _parts(self, batch: Any, done: int) -> Iterator[Any]:
        """Yield a batch, or parts of it that are no larger than the limit of a row."""
        size = sum(map(_size, batch.columns))
        if size <= MAX_LINE_BYTES:
            self._guard.add(size)
            yield batch
        elif batch.num_rows <= 1:
            raise UserError(
                f"{self._path}: row {done + 1} is longer than {MAX_LINE_BYTES >> 20} MiB, so it is no row of data"
            )
        else:
            half = batch.num_rows // 2
            yield from self._parts(batch.slice(0, half), done)
            yield from self._parts(batch.slice(half), done + half)


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[ParquetRows]:
    """Open the rows of a file. Raises UserError when it cannot be read; also while it is read."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path}: needs the package pyarrow; install it with: pip install pyarrow") from error
    try:
        with open_regular(path) as opened:
            yield ParquetRows(path, opened)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error


def _size(array: Any) -> int:
    """Return the bytes of the values of an array; a repeated value counts each time."""
    import pyarrow.compute
    from pyarrow import types

    kind = array.type
    if types.is_dictionary(kind):
        if str(kind.value_type) not in _TEXTS:
            return len(array) * max(1, kind.value_type.bit_width // 8)
        lengths = pyarrow.compute.cast(pyarrow.compute.binary_length(array.dictionary), "int64")
        return int(pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0) + len(array)
    if types.is_struct(kind):
        return sum(map(_size, array.flatten())) + len(array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        first, last = (array.offsets[end].as_py() for end in (0, -1))
        inner = (array.keys, array.items) if types.is_map(kind) else (array.values,)
        return sum(_size(values.slice(first, last - first)) for values in inner) + len(array)
    if types.is_fixed_size_list(kind):
        return _size(array.flatten()) + len(array)
    return int(array.nbytes)
