"""Reads rows, with the place of every fault: JSON Lines, JSON lists, tables (all also compressed), Parquet."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_dir, is_file, listed
from llmsuite.base.strict_json import first_repeated
from llmsuite.contract.specs import DataFormat
from llmsuite.data.compressed import PACKED, open_bytes, read_lines
from llmsuite.data.faults import Faults, OnBadRow
from llmsuite.data.keys import KEEP_ALL, ColumnRules
from llmsuite.data.parquet import open_parquet
from llmsuite.data.row_converter import RowConverter
from llmsuite.data.row_kinds import StagesByKind
from llmsuite.data.table import DELIMITERS, table_rows

KINDS = (".json", ".jsonl", ".parquet", *DELIMITERS)
_UNSUPPORTED = (".arrow", ".feather", ".ods", ".xls", ".xlsx")
"""Common tables that are not read, and would otherwise be taken for JSON Lines."""
_SPLITS = "dataset_dict.json"
"""File in a directory of `DatasetDict.save_to_disk`, which has a directory of `Dataset.save_to_disk` for each split."""
_FIRST_PART_BYTES = 1 << 20
"""Bytes of a list that are read for its first rows."""


class Rows(list[Any]):
    """Converted rows with the place of each, and the faults of the other rows."""

    def __init__(self, faults: Faults):
        super().__init__()
        self.places: list[str] = []
        """File and line of each row, such as "train.jsonl:7"."""
        self.faults = faults


def read_rows(
    path: Path,
    kind: str,
    name: str,
    formats: Mapping[str, DataFormat],
    on_bad_row: OnBadRow = "error",
    columns: ColumnRules = KEEP_ALL,
    limit: int | None = None,
    readers: StagesByKind | None = None,
) -> Rows:
    """Read and convert the rows of a file.

    Args:
        path: a file of one of `KINDS`, also with .gz or .zst added, or a directory of such files. Any other name is
            read as JSON Lines.
        kind: the type of rows that the stage needs, such as "preference".
        name: a format's name, or "auto" for the first one that matches the first row.
        formats: the registered formats.
        on_bad_row: "skip" to leave faulty rows out and count them.
        columns: the columns that are read and those that are ignored.
        limit: number of rows to read, the first ones without a fault; None for all.
        readers: the registered stages, for messages about rows of another kind.

    Raises:
        UserError: names file, line and reason of the first faulty rows; or no format fits, or the rest of a file
            cannot be read, or there are no rows.
    """
    converter = RowConverter(kind, name, formats, columns, readers)
    rows = Rows(Faults(on_bad_row))
    for where, raw, fault in _all_rows(path):
        if len(rows) == limit:
            break
        row = converter.convert(where, raw, fault, rows.faults)
        if row is not None:
            rows.append(row)
            rows.places.append(where)
    rows.faults.check()
    if not rows:
        skipped = ""
        if rows.faults.total:
            skipped = f": {rows.faults.summary()}"
        raise UserError(f"{path}: has no rows{skipped}")
    return rows


def raw_row(path: Path, place: str) -> Any:
    """Return the unconverted row at one of `Rows.places`."""
    return next(raw for where, raw, _ in _all_rows(path) if where == place)


def _all_rows(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the `raw_rows` of a file or of all files of a directory."""
    for file in data_files(path):
        yield from raw_rows(file)


def data_files(path: Path) -> list[Path]:
    """Return the file, or the data files of a directory, sorted by name.

    Raises:
        UserError: there are none, the directory has several splits, or the file is a table that is not supported.
    """
    if path.suffix.lower() in _UNSUPPORTED:
        raise UserError(f"{path}: {path.suffix} files are not read; save it as .csv, .jsonl or .parquet")
    if not is_dir(path):
        return [path]
    if is_file(path / _SPLITS):
        splits = sorted(file.parent for file in listed(path, "*/state.json"))
        if splits:
            raise UserError(f"{path}: is a data set of splits; name one of them: {', '.join(map(str, splits))}")
    found = sorted(file for file in path.iterdir() if is_file(file) and unpacked_suffix(file) in KINDS)
    if found:
        return found
    corpora = sorted(str(file.with_suffix("")) for file in listed(path, "*.idx"))
    if corpora:
        raise UserError(
            f"{path}: is a directory of indexed corpora; name one, others in pretrain.mix: {', '.join(corpora)}"
        )
    raise UserError(f"{path}: cannot be read: is a directory without {', '.join(KINDS)} files")


def unpacked_suffix(path: Path) -> str:
    """Return the suffix of a name, without that of the compression."""
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


def raw_rows(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the place of each row, its value, and the reason why it could not be parsed, or None.

    Raises:
        UserError: the rest of the file cannot be read: it is damaged, or its list is no valid JSON.
    """
    kind = unpacked_suffix(path)
    if kind == ".parquet":
        return _parquet(path)
    if kind in DELIMITERS:
        return _table(path, kind)
    return _list(path) if kind == ".json" else _lines(path)


def first_rows(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """Yield `raw_rows` for a caller that needs only a few of them: the file is read in parts."""
    if unpacked_suffix(path) == ".json":
        return _list_in_parts(path)
    return raw_rows(path)


def _lines(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    for where, raw, fault, _ in lines_with_offsets(path):
        yield where, raw, fault


def lines_with_offsets(path: Path) -> Iterator[tuple[str, Any, str | None, tuple[int, int]]]:
    """Yield the `raw_rows` of JSON Lines, each with its offset and size in the unpacked bytes."""
    parser = Parser()
    start = 0
    with open_bytes(path) as (stream, _):
        first = True
        for number, line in read_lines(stream, path):
            if row := strip_line(line, start):
                found, fault = parser.parse_line(row)
                if first and fault is not None and row.startswith(b"["):
                    raise UserError(
                        f"{path}:{number}: begins a list of rows over several lines; give the file the suffix .json"
                    )
                yield f"{path}:{number}", found, fault, (start, len(line))
                first = False
            start += len(line)


def strip_line(line: bytes, start: int) -> bytes:
    """Strip white space, and in the first line of a file (`start` 0) the byte order mark."""
    return (line.removeprefix(b"\xef\xbb\xbf") if start == 0 else line).strip()


def _table(path: Path, kind: str) -> Iterator[tuple[str, Any, str | None]]:
    with open_bytes(path) as (stream, _):
        yield from table_rows(stream, path, kind)


def _list(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    with open_bytes(path) as (stream, _):
        data = stream.read()
    yield from _rows_of(data, path)


def _list_in_parts(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the rows of `_list`, reading at most about twice the bytes that the consumed rows take."""
    data = b""
    has_ended = False
    count = 0
    with open_bytes(path) as (stream, _):
        while not has_ended:
            size = max(_FIRST_PART_BYTES, len(data))
            more = stream.read(size)
            data = data + more
            has_ended = len(more) < size
            try:
                for found in itertools.islice(_rows_of(data, path, has_ended), count, None):
                    yield found
                    count += 1
                return
            except UserError:  # the part may end within a row
                if has_ended:
                    raise


def _rows_of(data: bytes, path: Path, is_complete: bool = True) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the rows of a list; of an incomplete one, raise UserError after the last complete row."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, is_complete)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{number}: is not UTF-8: {error.reason}") from error
    parser = Parser()
    at = _skip(text, 0)
    line = 1
    if _are_lines(text, at):
        yield from _lines(path)
        return
    if not text.startswith("[", at):
        row, _ = parser.parse_all(text, path, at, 1)
        raise UserError(f"{path}: is a {type(row).__name__}, not a list of rows")
    count = 0
    done = 0
    at = _skip(text, at + 1)
    while not (count == 0 and text.startswith("]", at)):
        count += 1
        line = line + text.count("\n", done, at)
        done = at
        row, fault, at = parser.parse_at(text, at, path, line)
        yield f"{path}:{line}: row {count}", row, fault
        at = _skip(text, at)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            line += text.count("\n", done, at)
            raise UserError(f"{path}:{line}: is not JSON: ',' or ']' is missing after row {count}")
        at = _skip(text, at + 1)
    rest = text[at + 1 :].strip()
    if rest:
        line += text.count("\n", done, at + 1)
        raise UserError(f"{path}:{line}: is not JSON: there is more after the list: {rest[:20]!r}")


def _are_lines(text: str, at: int) -> bool:
    """Return True if a .json text is JSON Lines, like PaddleNLP's train.json and many files of hubs.

    Its first line is then a complete object, and more lines follow.
    """
    first, _, rest = text[at:].partition("\n")
    if not first.startswith("{") or not rest.strip():
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


_SPACE = re.compile(r"[ \t\r\n]*")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


class Parser:
    """Parser of strict JSON: no duplicate key and no NaN. Such a fault is of its row only: later rows are read."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_float=self._number, parse_constant=self._constant
        )
        self._fault: str | None = None

    def parse_line(self, line: bytes) -> tuple[Any, str | None]:
        """Return the row of a line, or its fault."""
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            return None, f"is not UTF-8: {error.reason}"
        self._fault = None
        try:
            return self._decoder.decode(text), self._fault
        except (ValueError, RecursionError) as error:
            return None, f"is not a JSON line: {error}"

    def parse_at(self, text: str, start: int, path: Path, line: int) -> tuple[Any, str | None, int]:
        """Return the row that begins at `start`, its fault, and its end. Raises UserError when it is no JSON."""
        self._fault = None
        try:
            row, end = self._decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                line = error.lineno
            raise UserError(f"{path}:{line}: is not JSON: {error}") from error
        return row, self._fault, end

    def parse_all(self, text: str, path: Path, start: int, line: int) -> tuple[Any, str | None]:
        """Return the row that is the rest of a text, and its fault. Raises UserError when it is no JSON."""
        row, fault, end = self.parse_at(text, start, path, line)
        if text[end:].strip():
            line = text.count("\n", 0, _skip(text, end)) + 1
            raise UserError(
                f"{path}:{line}: is not JSON: there is more after it; a file with one row per line is called .jsonl"
            )
        return row, fault

    def _object(self, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            self._fault = f"has the key {first_repeated(name for name, _ in pairs)!r} twice"
        return found

    def _number(self, written: str) -> float:
        number = float(written)
        if not math.isfinite(number):
            self._fault = f"has the number {written[:40]}, which is larger than any"
        return number

    def _constant(self, name: str) -> float:
        self._fault = f"has {name}, which is no JSON"
        return float(name)


def _parquet(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    with open_parquet(path) as file:
        for number, row in enumerate(file.rows(), 1):
            yield f"{path}: row {number}", row, None
