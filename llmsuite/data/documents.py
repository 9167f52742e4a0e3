"""Reads documents of text one at a time: plain text, JSON Lines, tables (all also compressed) and Parquet."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.columns import columns_of, is_template
from llmsuite.data.columns import rename_columns
from llmsuite.data.compressed import open_bytes, read_lines
from llmsuite.data.faults import Faults
from llmsuite.data.parquet import open_parquet
from llmsuite.data.read import Parser
from llmsuite.data.suggest import key_option, near, shell_quoted, suggest_text_column
from llmsuite.data.table import DELIMITERS, table_rows

Division = Literal["blank_lines", "lines", "files"]
"""The separator of documents in a plain text."""
KINDS = (".txt", ".jsonl", ".parquet", *DELIMITERS)
_FIRST_PART_BYTES = 1 << 20
"""Bytes of plain text that are read for its first document."""
_KEY = "pretrain.key, or --key of `llmsuite data index`, names the column"
_ARROW_TEXTS = ("string", "large_string", "string_view")
"""Arrow's types of text."""


def text_key(columns: Mapping[str, str], key: str) -> str:
    """Return the source of a row's text, as `read_documents` takes it: `pretrain.key`, or its entry in `data.columns`.

    Raises:
        UserError: `data.columns` has other fields.
    """
    if columns and list(columns) != [key]:
        raise UserError(
            f"data.columns: has {', '.join(columns)}; the one field of pretraining is {key!r}, the text (pretrain.key)"
        )
    return columns.get(key, key)


def check_has_columns(path: Path, columns: Mapping[str, str]) -> None:
    """Raise UserError if `data.columns` is set for a file without columns."""
    if columns and path.name.endswith((".idx", ".bin", ".txt", ".txt.gz", ".txt.zst")):
        raise UserError(f"data.columns: {path} has no columns; remove that key, or name a file of rows")


def kind_of(path: Path) -> str:
    """Return the one of `KINDS` that a file is by its name, compressed or not. Raises UserError when it is none."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    kind = next((kind for kind in KINDS if name.endswith(kind)), None)
    if kind is None or (kind == ".parquet" and name != path.name):
        raise UserError(f"{path}: is none of .txt, .jsonl, .csv, .tsv (each also with .gz or .zst added), .parquet")
    return kind


def read_documents(path: Path, division: Division, key: str, faults: Faults | None = None) -> Iterator[tuple[str, int]]:
    """Yield each document that is not blank, and the number of bytes of the file read so far.

    Args:
        path: a file of one of `KINDS`.
        division: the separator of documents in a .txt.
        key: source of a row's text: the name of a column, or a template as in `data.columns`.
        faults: records the faulty rows and lines, which are left out if it skips; else the first one is an error.

    Raises:
        UserError: the file or a row of it cannot be read; names the line.
    """
    kind = kind_of(path)
    faults = faults or Faults()
    if kind == ".txt":
        texts = _plain(path, division, faults)
    else:
        read = {".jsonl": _json_lines, ".parquet": _parquet}.get(kind, _table)
        texts = _texts(read(path, key), key, faults)
    return ((text, done) for text, done in texts if text.strip())


def first_document(path: Path, key: str, faults: Faults) -> str | None:
    """Return the first document that is not blank, or its first line; None if there is none.

    Of plain text only the first part is read, and an empty text stands for a first document beyond it. Arguments and
    errors are those of `read_documents`.
    """
    if kind_of(path) != ".txt":
        return next((text for text, _ in read_documents(path, "lines", key, faults)), None)
    with open_bytes(path) as (stream, _):
        part = io.BytesIO(stream.read(_FIRST_PART_BYTES))
        is_complete = not stream.read(1)
    found = [line for _, line in _lines(part, path, faults, is_complete) if line.strip()]
    if found:
        return found[0]
    return None if is_complete else ""


def _plain(path: Path, division: Division, faults: Faults) -> Iterator[tuple[str, int]]:
    with open_bytes(path) as (stream, raw):
        if division == "files":
            yield "".join(text for _, text in _lines(stream, path, faults)), raw.tell()
            return
        part: list[str] = []
        for _, line in _lines(stream, path, faults):
            if division == "lines":
                yield line.rstrip("\r\n"), raw.tell()
            elif line.strip():
                part.append(line)
            elif part:
                yield "".join(part).rstrip("\r\n"), raw.tell()
                part = []
        yield "".join(part).rstrip("\r\n"), raw.tell()


def _lines(stream: IO[bytes], path: Path, faults: Faults, is_complete: bool = True) -> Iterator[tuple[int, str]]:
    """Yield lines of text of any length. The last line of an incomplete stream may end within a character."""
    for number, line in enumerate(stream, 1):
        decoder = codecs.getincrementaldecoder("utf-8-sig" if number == 1 else "utf-8")()
        try:
            yield number, decoder.decode(line, is_complete or line.endswith(b"\n"))
        except UnicodeDecodeError as error:
            _bad(faults, f"{path}:{number}", f"is not UTF-8: {error.reason}")


_PlacedRow = tuple[str, Any, str | None, int]
"""The place of a row, its value, its fault or None, and the number of bytes of the file read so far."""


def _texts(rows: Iterator[_PlacedRow], key: str, faults: Faults) -> Iterator[tuple[str, int]]:
    for place, row, fault, done in rows:
        text: Any = None
        if fault is None and (not isinstance(row, dict) or (not is_template(key) and key not in row)):
            found = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
            hint = _hint(key, row) if isinstance(row, dict) else ""
            fault = f"has no key {key!r}, which is to hold the text; it has {found}; {_KEY}{hint}"
        if fault is None:
            try:
                text = rename_columns(row, {"text": key})["text"]
            except ValueError as error:
                fault = str(error)
        fault = fault or _text_fault(text, key)
        if fault is None:
            yield text, done
        else:
            _bad(faults, place, fault)


def _json_lines(path: Path, key: str) -> Iterator[_PlacedRow]:
    parser = Parser()
    with open_bytes(path) as (stream, raw):
        for number, line in read_lines(stream, path):
            text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if text:
                yield f"{path}:{number}", *parser.parse_line(text), raw.tell()


def _table(path: Path, key: str) -> Iterator[_PlacedRow]:
    with open_bytes(path) as (stream, raw):
        for place, row, fault in table_rows(stream, path, kind_of(path)):
            yield place, row, fault, raw.tell()


def _parquet(path: Path, key: str) -> Iterator[_PlacedRow]:
    columns = list(dict.fromkeys(columns_of(key)))
    with open_parquet(path) as file:
        for column in columns:
            if column not in file.types:
                # no row is read: values of the right types are enough to suggest a column of text
                row = {name: "" if kind in _ARROW_TEXTS else None for name, kind in file.types.items()}
                raise UserError(
                    f"{path}: has no column {column!r}; it has {', '.join(row)}; {_KEY}{_hint(column, row)}"
                )
        size = path.stat().st_size
        total = max(file.num_rows, 1)
        for number, row in enumerate(file.rows(columns), 1):
            yield f"{path}: row {number}", row, None, size * min(number, total) // total


def _bad(faults: Faults, where: str, fault: str) -> None:
    faults.add(where, fault)
    faults.check()


def _hint(key: str, row: Mapping[str, Any]) -> str:
    """End of a message about a row without the column of text: the option that names a likely one."""
    found = near(key, row) or suggest_text_column(row)
    if found is None:
        return ""
    return f", such as {shell_quoted(key_option('pretrain.key', found))}"


def _text_fault(text: Any, key: str) -> str | None:
    if not isinstance(text, str):
        return f"{key!r} is a {type(text).__name__}, not text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{key!r} has half of a surrogate pair, which is no text"
    return None
