"""Documents of text from files, one at a time: plain text, JSON Lines (also compressed) and Parquet."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from llmsuite.errors import UserError

Division = Literal["blank_lines", "lines", "files"]
"""What parts the documents of a plain text."""
KINDS = (".txt", ".jsonl", ".parquet")
_PARQUET_ROWS = 1024


def kind_of(path: Path) -> str:
    """One of KINDS, by the name of a file; compressed or not. Raises UserError when it is none."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    kind = next((kind for kind in KINDS if name.endswith(kind)), None)
    if kind is None or (kind == ".parquet" and name != path.name):
        raise UserError(f"{path}: is none of .txt, .jsonl (also with .gz or .zst behind it), .parquet")
    return kind


def read_documents(path: Path, division: Division, key: str) -> Iterator[tuple[str, int]]:
    """Each document that is not blank, and how many bytes of the file are read by then.

    Args:
        path: a file of one of KINDS.
        division: where a document of a .txt ends.
        key: of the text in .jsonl rows; column of .parquet.

    Raises:
        UserError: the file or a row of it cannot be read; with the line.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        texts = _parquet(path, key)
    else:
        texts = _plain(path, division) if kind == ".txt" else _json_lines(path, key)
    return ((text, done) for text, done in texts if text.strip())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[io.TextIOBase, IO[bytes]]]:
    """The text of a file, and the file below it, whose position says how far it is read."""
    damaged: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)  # EOFError: a .gz that is cut short
    with contextlib.ExitStack() as stack:
        try:
            raw = stack.enter_context(open(path, "rb"))
            plain: Any = raw
            if path.suffix == ".gz":
                plain = stack.enter_context(gzip.GzipFile(fileobj=raw))
            elif path.suffix == ".zst":
                zstandard = _zstandard(path)
                damaged += (zstandard.ZstdError,)
                plain = stack.enter_context(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
            yield io.TextIOWrapper(plain, encoding="utf-8-sig", newline="\n"), raw
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is not UTF-8: {error.reason}") from error
        except damaged as error:
            raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: needs the package zstandard; install it with: pip install zstandard") from error
    return zstandard


def _plain(path: Path, division: Division) -> Iterator[tuple[str, int]]:
    with _opened(path) as (text, raw):
        if division == "files":
            yield text.read(), raw.tell()
            return
        lines: list[str] = []
        for line in text:
            if division == "lines":
                yield line.rstrip("\r\n"), raw.tell()
            elif line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines).rstrip("\r\n"), raw.tell()
                lines = []
        yield "".join(lines).rstrip("\r\n"), raw.tell()


def _json_lines(path: Path, key: str) -> Iterator[tuple[str, int]]:
    with _opened(path) as (lines, raw):
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: is not a JSON line: {error}") from error
            if not isinstance(row, dict) or key not in row:
                found = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise UserError(f"{path}:{number}: has no key {key!r}, which is to hold the text; it has {found}")
            yield _checked(row[key], f"{path}:{number}: {key}"), raw.tell()


def _parquet(path: Path, column: str) -> Iterator[tuple[str, int]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: needs the package pyarrow; install it with: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise UserError(f"{path}: has no column {column!r}; it has {', '.join(file.schema_arrow.names)}")
            size, total, row = path.stat().st_size, file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(text, f"{path}: row {row}: {column}"), size * row // total
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{where}: is a {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: has half of a surrogate pair, which is no text") from error
    return text
