"""Documents of text from files, one at a time: plain text, JSON Lines, tables (all also compressed) and Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from llmsuite.data.columns import renamed
from llmsuite.data.compressed import lines, open_bytes
from llmsuite.data.faults import Faults
from llmsuite.data.parquet import open_parquet
from llmsuite.data.read import Parser
from llmsuite.data.table import DELIMITERS, table_rows
from llmsuite.errors import UserError
from llmsuite.schema.columns import columns_of, is_template

Division = Literal["blank_lines", "lines", "files"]
"""The separator of documents in a plain text."""
KINDS = (".txt", ".jsonl", ".parquet", *DELIMITERS)
_PARQUET_ROWS = 1024
_KEY = "pretrain.key, or --key of `llmsuite data index`, says which it is"


def kind_of(path: Path) -> str:
    """One of KINDS, by the name of a file; compressed or not. Raises UserError when it is none."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    kind = next((kind for kind in KINDS if name.endswith(kind)), None)
    if kind is None or (kind == ".parquet" and name != path.name):
        raise UserError(f"{path}: is none of .txt, .jsonl, .csv, .tsv (also with .gz or .zst behind it), .parquet")
    return kind


def read_documents(path: Path, division: Division, key: str, faults: Faults | None = None) -> Iterator[tuple[str, int]]:
    """Each document that is not blank, and the number of bytes of the file read so far.

    Args:
        path: a file of one of KINDS.
        division: where a document of a .txt ends.
        key: what the text of a row is made of: the name of a column, or a template as `data.columns` has them.
        faults: gets the faulty rows and lines, which are left out if it skips; else the first one is an error.

    Raises:
        UserError: the file or a row of it cannot be read; with the line.
    """
    kind, faults = kind_of(path), faults or Faults()
    if kind == ".txt":
        texts = _plain(path, division, faults)
    else:
        read = {".jsonl": _json_lines, ".parquet": _parquet}.get(kind, _table)
        texts = _texts(read(path, key), key, faults)
    return ((text, done) for text, done in texts if text.strip())


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


def _lines(stream: IO[bytes], path: Path, faults: Faults) -> Iterator[tuple[int, str]]:
    """Lines of text, however long they are."""
    for number, line in enumerate(stream, 1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            _bad(faults, f"{path}:{number}", f"is not UTF-8: {error.reason}")


Found = tuple[str, Any, str | None, int]
"""The place of a row, its value, the fault for which it is none, and the number of bytes of the file read so far."""


def _texts(rows: Iterator[Found], key: str, faults: Faults) -> Iterator[tuple[str, int]]:
    for place, row, fault, done in rows:
        text: Any = None
        if fault is None and (not isinstance(row, dict) or (not is_template(key) and key not in row)):
            found = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
            fault = f"has no key {key!r}, which is to hold the text; it has {found}; {_KEY}"
        if fault is None:
            try:
                text = renamed(row, {"text": key})["text"]
            except ValueError as error:
                fault = str(error)
        fault = fault or _text_fault(text, key)
        if fault is None:
            yield text, done
        else:
            _bad(faults, place, fault)


def _json_lines(path: Path, key: str) -> Iterator[Found]:
    parser = Parser()
    with open_bytes(path) as (stream, raw):
        for number, line in lines(stream, path):
            text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if text:
                yield f"{path}:{number}", *parser.line(text), raw.tell()


def _table(path: Path, key: str) -> Iterator[Found]:
    with open_bytes(path) as (stream, raw):
        for place, row, fault in table_rows(stream, path, kind_of(path)):
            yield place, row, fault, raw.tell()


def _parquet(path: Path, key: str) -> Iterator[Found]:
    columns = list(dict.fromkeys(columns_of(key)))
    with open_parquet(path) as file:
        for column in columns:
            if column not in file.schema_arrow.names:
                raise UserError(
                    f"{path}: has no column {column!r}; it has {', '.join(file.schema_arrow.names)}; {_KEY}"
                )
        size, total, number = path.stat().st_size, file.metadata.num_rows, 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row, None, size * number // total


def _bad(faults: Faults, where: str, fault: str) -> None:
    faults.add(where, fault)
    faults.check()


def _text_fault(text: Any, key: str) -> str | None:
    if not isinstance(text, str):
        return f"{key!r} is a {type(text).__name__}, not text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{key!r} has half of a surrogate pair, which is no text"
    return None
