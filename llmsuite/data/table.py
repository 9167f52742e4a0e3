"""Reads rows of .csv and .tsv files, each with its place. The first row names the columns; every cell is text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmsuite.base.errors import UserError
from llmsuite.base.strict_json import first_repeated
from llmsuite.data.compressed import MAX_LINE_BYTES, read_lines

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OTHERS = ";\t|,"
_MAX_SHOWN = 20
"""Columns that a message names."""


def table_rows(stream: IO[bytes], path: Path, kind: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yield the place of each row, its cells by column, and its fault or None.

    Cells with the delimiter, quotes or ends of lines in them are quoted (RFC 4180); empty lines are skipped.

    Args:
        stream: the unpacked bytes of a file, in UTF-8.
        path: of it, for messages.
        kind: its suffix, one of `DELIMITERS`.

    Raises:
        UserError: its quotes or its header are wrong.
    """
    header: list[str] | None = None
    shown = ""
    for number, cells in _cells(stream, path, DELIMITERS[kind]):
        if header is None:
            header = cells
            _check_header(header, path, number, kind)
            shown = ", ".join(header[:_MAX_SHOWN]) + ", …" * (len(header) > _MAX_SHOWN)
            continue
        fault = None
        if len(cells) != len(header):
            fault = f"has {len(cells)} columns, and the header {len(header)}: {shown}"
        elif not _is_text(cells):
            fault = "is not UTF-8"
        yield f"{path}:{number}", dict(zip(header, cells)), fault


def _cells(stream: IO[bytes], path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the cells of each row that is not empty.

    Bytes that are not UTF-8 become surrogates, which no text has: as quotes may span lines, only the parsed row shows
    where such bytes belong.
    """
    texts = (
        (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).decode("utf-8", "surrogateescape")
        for number, line in read_lines(stream, path)
    )
    csv.field_size_limit(MAX_LINE_BYTES)  # a setting of the process; `read_lines` enforces the same limit for lines
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    begin = 1
    try:
        for cells in reader:
            if cells:
                yield begin, cells
            begin = reader.line_num + 1
    except csv.Error as error:
        if "new-line character" in str(error):
            raise UserError(f"{path}:{begin}: has a \\r within a line; lines end with \\n or \\r\\n") from error
        raise UserError(f"{path}:{begin}: cannot be read: {error}; quotes within a quoted cell are doubled") from error


def _is_text(cells: list[str]) -> bool:
    return not any("\udc80" <= char <= "\udcff" for cell in cells for char in cell)


def _check_header(header: list[str], path: Path, number: int, kind: str) -> None:
    if not _is_text(header):
        raise UserError(f"{path}:{number}: is not UTF-8; save the file as UTF-8")
    repeated = first_repeated(header)
    if repeated is not None:
        raise UserError(f"{path}:{number}: names the column {repeated!r} twice")
    if len(header) > 1:
        return
    other = next((delimiter for delimiter in _OTHERS if delimiter in header[0]), None)
    if other is not None:
        raise UserError(
            f"{path}:{number}: has the one column {header[0]!r}; a {kind} file has {DELIMITERS[kind]!r} between its "
            f"cells, and not {other!r}"
        )
