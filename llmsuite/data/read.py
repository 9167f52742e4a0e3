"""Rows from JSON and JSON Lines files, with the place of every fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.hookspecs import DataFormat

_MAX_REPORTED = 10


def read_rows(path: Path, kind: str, name: str, formats: Mapping[str, DataFormat]) -> list[Any]:
    """All rows of a file, converted.

    Args:
        path: `.json` with a list of objects, or one object a line.
        kind: what the stage needs, such as "preference".
        name: a format's name, or "auto" to take the first one that matches the first row.
        formats: the registered formats.

    Raises:
        UserError: with file, line and reason of the first faulty rows; or no format fits.
    """
    chosen: DataFormat | None = None if name == "auto" else formats[name]
    if chosen is not None and chosen.kind != kind:
        raise UserError(f"data.format: {name} gives {chosen.kind} rows; this stage learns from {kind} rows")
    rows, faults = [], []
    for where, raw in _raw_rows(path):
        if not isinstance(raw, Mapping):
            faults.append(f"{where}: is a {type(raw).__name__}, not an object")
            continue
        if fault := _text_fault(raw):
            faults.append(f"{where}: {fault}")
            continue
        if chosen is None:
            chosen = _recognise(raw, where, kind, formats)
        try:
            rows.append(chosen.convert(raw))
        except KeyError as error:
            faults.append(f"{where}: has no key {error}; {chosen.name} needs: {chosen.help}")
        except ValueError as error:
            faults.append(f"{where}: {error}")
    if faults:
        more = f"\nand {len(faults) - _MAX_REPORTED} more" if len(faults) > _MAX_REPORTED else ""
        raise UserError("\n".join(faults[:_MAX_REPORTED]) + more)
    if not rows:
        raise UserError(f"{path}: has no rows")
    return rows


def _recognise(row: Mapping[str, Any], where: str, kind: str, formats: Mapping[str, DataFormat]) -> DataFormat:
    fitting = [f for f in formats.values() if f.kind == kind]
    for candidate in fitting:
        if candidate.matches(row):
            return candidate
    known = "; ".join(f"{f.name} ({f.help})" for f in fitting)
    raise UserError(f"{where}: keys {sorted(row)} fit no format with {kind} rows. Known: {known or 'none'}")


def _text_fault(row: Mapping[str, Any]) -> str | None:
    """What no tokenizer would take, though JSON can say it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair (\\ud800 to \\udfff), which is no text"
    except RecursionError:
        return "is nested too deeply"
    return None


def _raw_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: is not UTF-8: {error.reason}") from error
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not JSON: {error}") from error
        if not isinstance(rows, list):
            raise UserError(f"{path}: is a {type(rows).__name__}, not a list of rows")
        yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows, 1))
        return
    for number, row in enumerate(text.split("\n"), 1):
        if not row.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(row)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: is not a JSON line: {error}") from error
