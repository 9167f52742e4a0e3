"""Parquet files, which take a package of their own to read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.regular import open_regular


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`. Raises UserError when it cannot be read; also while it is read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: needs the package pyarrow; install it with: pip install pyarrow") from error
    try:
        with open_regular(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
