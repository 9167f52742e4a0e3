"""Documents of text from files, one at a time: plain text, JSON Lines (also compressed) and Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from llmsuite.data.compressed import lines, open_bytes
from llmsuite.data.parquet import open_parquet
from llmsuite.data.read import Faults, Parser
from llmsuite.errors import UserError

Division = Literal["blank_lines", "lines", "files"]
"""The separator of documents in a plain text."""
KINDS = (".txt", ".jsonl", ".parquet")
_PARQUET_ROWS = 1024


def kind_of(path: Path) -> str:
    """One of KINDS, by the name of a file; compressed or not. Raises UserError when it is none."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    kind = next((kind for kind in KINDS if name.endswith(kind)), None)
    if kind is None or (kind == ".parquet" and name != path.name):
        raise UserError(f"{path}: is none of .txt, .jsonl (also with .gz or .zst behind it), .parquet")
    return kind


def read_documents(path: Path, division: Division, key: str, faults: Faults | None = None) -> Iterator[tuple[str, int]]:
    """Each document that is not blank, and the number of bytes of the file read so far.

    Args:
        path: a file of one of KINDS.
        division: where a document of a .txt ends.
        key: of the text in .jsonl rows; column of .parquet.
        faults: gets the faulty rows and lines, which are left out if it skips; else the first one is an error.

    Raises:
        UserError: the file or a row of it cannot be read; with the line.
    """
    kind, faults = kind_of(path), faults or Faults()
    if kind == ".parquet":
        texts = _parquet(path, key, faults)
    else:
        texts = _plain(path, division, faults) if kind == ".txt" else _json_lines(path, key, faults)
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


def _json_lines(path: Path, key: str, faults: Faults) -> Iterator[tuple[str, int]]:
    parser = Parser()
    with open_bytes(path) as (stream, raw):
        for number, line in lines(stream, path):
            text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if not text:
                continue
            row, fault = parser.line(text)
            if fault is None and (not isinstance(row, dict) or key not in row):
                found = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
                fault = f"has no key {key!r}, which is to hold the text; it has {found}"
            fault = fault or _text_fault(row[key], key)
            if fault is None:
                yield row[key], raw.tell()
            else:
                _bad(faults, f"{path}:{number}", fault)


def _parquet(path: Path, column: str, faults: Faults) -> Iterator[tuple[str, int]]:
    with open_parquet(path) as file:
        if column not in file.schema_arrow.names:
            raise UserError(f"{path}: has no column {column!r}; it has {', '.join(file.schema_arrow.names)}")
        size, total, row = path.stat().st_size, file.metadata.num_rows, 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                if fault := _text_fault(text, column):
                    _bad(faults, f"{path}: row {row}", fault)
                else:
                    yield text, size * row // total


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
