"""Readers of rows, with the place of every fault: JSON Lines, JSON lists, tables (all also compressed), Parquet."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.data.compressed import PACKED, lines, open_bytes
from llmsuite.data.conversion import Conversion
from llmsuite.data.faults import Faults, OnBadRow
from llmsuite.data.kinds import Readers
from llmsuite.data.parquet import open_parquet
from llmsuite.data.table import DELIMITERS, table_rows
from llmsuite.errors import UserError
from llmsuite.regular import is_dir, is_file, listed
from llmsuite.specs import DataFormat
from llmsuite.strict_json import first_repeated

KINDS = (".json", ".jsonl", ".parquet", *DELIMITERS)
_UNREAD = (".arrow", ".feather", ".ods", ".xls", ".xlsx")
"""Tables that people have, and that would be read as JSON Lines."""
_SPLITS = "dataset_dict.json"
"""In a directory that `DatasetDict.save_to_disk` wrote: a directory of `Dataset.save_to_disk` for each split."""
_FIRST_PART = 1 << 20
"""Bytes of a list that are read for its first rows."""


class Rows(list[Any]):
    """Converted rows, with the place of each, and the faults of the others."""

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
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    readers: Readers | None = None,
) -> Rows:
    """The rows of a file, converted.

    Args:
        path: a file of one of KINDS, perhaps with .gz or .zst behind it; a directory for all of those in it. Any other
            name is read as JSON Lines.
        kind: the type of rows that the stage needs, such as "preference".
        name: a format's name, or "auto" to take the first one that matches the first row.
        formats: the registered formats.
        on_bad_row: "skip" to leave faulty rows out and count them.
        columns: what fields a row gets from its columns, see `renamed`; none to take it as it is.
        limit: how many rows to read, the first ones without a fault; None for all.
        readers: the registered stages, which messages about rows of another kind name.

    Raises:
        UserError: with file, line and reason of the first faulty rows; or no format fits, or the rest of a file cannot
            be read, or there are no rows.
    """
    conversion = Conversion(kind, name, formats, columns, readers)
    rows = Rows(Faults(on_bad_row))
    for where, raw, fault in _all_rows(path):
        if len(rows) == limit:
            break
        row = conversion.convert(where, raw, fault, rows.faults)
        if row is not None:
            rows.append(row)
            rows.places.append(where)
    rows.faults.check()
    if not rows:
        skipped = f": {rows.faults.summary()}" if rows.faults.total else ""
        raise UserError(f"{path}: has no rows{skipped}")
    return rows


def raw_row(path: Path, place: str) -> Any:
    """The row at a place that `Rows.places` has, as the file has it."""
    return next(raw for where, raw, _ in _all_rows(path) if where == place)


def _all_rows(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """As `raw_rows`, of a file or of all files of a directory."""
    for file in data_files(path):
        yield from raw_rows(file)


def data_files(path: Path) -> list[Path]:
    """The file, or the files of data in a directory, by name. Raises UserError when there are none, it has several
    splits, or the file is a table that is not read."""
    if path.suffix.lower() in _UNREAD:
        raise UserError(f"{path}: {path.suffix} files are not read; save it as .csv, .jsonl or .parquet")
    if not is_dir(path):
        return [path]
    if is_file(path / _SPLITS) and (splits := sorted(file.parent for file in listed(path, "*/state.json"))):
        raise UserError(f"{path}: is a data set of splits; name one of them: {', '.join(map(str, splits))}")
    found = sorted(file for file in path.iterdir() if is_file(file) and unpacked_suffix(file) in KINDS)
    if not found and (corpora := sorted(str(file.with_suffix("")) for file in listed(path, "*.idx"))):
        raise UserError(
            f"{path}: is a directory of indexed corpora; name one, others in pretrain.mix: {', '.join(corpora)}"
        )
    if not found:
        raise UserError(f"{path}: cannot be read: is a directory without {', '.join(KINDS)} files")
    return found


def unpacked_suffix(path: Path) -> str:
    """Suffix of a name, without that of the compression."""
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


def raw_rows(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """The place of each row, its value, and the fault for which it could not be parsed, or None.

    Raises:
        UserError: the rest of the file cannot be read: it is damaged, or its list is no JSON.
    """
    kind = unpacked_suffix(path)
    if kind == ".parquet":
        return _parquet(path)
    if kind in DELIMITERS:
        return _table(path, kind)
    return _list(path) if kind == ".json" else _lines(path)


def first_rows(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """As `raw_rows`, for whoever asks for a few rows only: no more of the file is read than they take."""
    return _list_in_parts(path) if unpacked_suffix(path) == ".json" else raw_rows(path)


def _lines(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    for where, raw, fault, _ in spanned_lines(path):
        yield where, raw, fault


def spanned_lines(path: Path) -> Iterator[tuple[str, Any, str | None, tuple[int, int]]]:
    """As `raw_rows`, of JSON Lines, with the first of the unpacked bytes of each row and their number."""
    parser, start = Parser(), 0
    with open_bytes(path) as (stream, _):
        first = True
        for number, line in lines(stream, path):
            if row := bare(line, start):
                found, fault = parser.line(row)
                if first and fault is not None and row.startswith(b"["):
                    raise UserError(
                        f"{path}:{number}: begins a list of rows over several lines; its name is .json then"
                    )
                yield f"{path}:{number}", found, fault, (start, len(line))
                first = False
            start += len(line)


def bare(line: bytes, start: int) -> bytes:
    """A line without white space around it, nor the mark of UTF-8 that a file may begin with."""
    return (line.removeprefix(b"\xef\xbb\xbf") if start == 0 else line).strip()


def _table(path: Path, kind: str) -> Iterator[tuple[str, Any, str | None]]:
    with open_bytes(path) as (stream, _):
        yield from table_rows(stream, path, kind)


def _list(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    with open_bytes(path) as (stream, _):
        data = stream.read()
    yield from _rows_of(data, path)


def _list_in_parts(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """As `_list`, without reading more of the file than the rows take that are asked for, or about twice as much."""
    data, has_ended, count = b"", False, 0
    with open_bytes(path) as (stream, _):
        while not has_ended:
            size = max(_FIRST_PART, len(data))
            more = stream.read(size)
            data, has_ended = data + more, len(more) < size
            try:
                for found in itertools.islice(_rows_of(data, path, has_ended), count, None):
                    yield found
                    count += 1
                return
            except UserError:  # the part may end within a row
                if has_ended:
                    raise


def _rows_of(data: bytes, path: Path, is_whole: bool = True) -> Iterator[tuple[str, Any, str | None]]:
    """The rows of a list; of one that is not whole, a UserError behind the last row that is."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, is_whole)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{number}: is not UTF-8: {error.reason}") from error
    parser, at, line = Parser(), _skip(text, 0), 1
    if _are_lines(text, at):
        yield from _lines(path)
        return
    if not text.startswith("[", at):
        row, _ = parser.whole(text, path, at, 1)
        raise UserError(f"{path}: is a {type(row).__name__}, not a list of rows")
    count, done, at = 0, 0, _skip(text, at + 1)
    while not (count == 0 and text.startswith("]", at)):
        count += 1
        line, done = line + text.count("\n", done, at), at
        row, fault, at = parser.at(text, at, path, line)
        yield f"{path}:{line}: row {count}", row, fault
        at = _skip(text, at)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            line += text.count("\n", done, at)
            raise UserError(f"{path}:{line}: is not JSON: ',' or ']' is missing behind row {count}")
        at = _skip(text, at + 1)
    if rest := text[at + 1 :].strip():
        line += text.count("\n", done, at + 1)
        raise UserError(f"{path}:{line}: is not JSON: there is more behind the list: {rest[:20]!r}")


def _are_lines(text: str, at: int) -> bool:
    """Whether a text that begins there is JSON Lines by another name, as PaddleNLP's train.json and many on hubs are:
    its first line is a whole object, and there are more."""
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
    """Strict JSON: no duplicate key and no NaN. Such a fault concerns its row only: the rows after it are read."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_float=self._number, parse_constant=self._constant
        )
        self._fault: str | None = None

    def line(self, line: bytes) -> tuple[Any, str | None]:
        """The row of a line, or its fault."""
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            return None, f"is not UTF-8: {error.reason}"
        self._fault = None
        try:
            return self._decoder.decode(text), self._fault
        except (ValueError, RecursionError) as error:
            return None, f"is not a JSON line: {error}"

    def at(self, text: str, start: int, path: Path, line: int) -> tuple[Any, str | None, int]:
        """The row that begins there, its fault, and where it ends. Raises UserError when it is no JSON."""
        self._fault = None
        try:
            row, end = self._decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                line = error.lineno
            raise UserError(f"{path}:{line}: is not JSON: {error}") from error
        return row, self._fault, end

    def whole(self, text: str, path: Path, start: int, line: int) -> tuple[Any, str | None]:
        """As `at`, for a text that has to end with the row."""
        row, fault, end = self.at(text, start, path, line)
        if text[end:].strip():
            line = text.count("\n", 0, _skip(text, end)) + 1
            raise UserError(f"{path}:{line}: is not JSON: there is more behind it; one row a line is called .jsonl")
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
