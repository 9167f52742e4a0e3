"""Output of commands that read something: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llmsuite.base.redaction import printable

JSON_HELP = "print JSON, for programs"


def print_json(data: Any) -> None:
    """Print data as JSON. Numbers that are not finite, which JSON does not have, become null."""
    print(json.dumps(_finite(data), indent=2, ensure_ascii=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts in columns that are two spaces apart, below a head unless it is empty."""
    table: list[list[str]] = []
    for row in [head, *rows] if head else rows:
        table.append([printable(cell).replace("\n", " ") for cell in row])
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip())


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not float("-inf") < data < float("inf"):
        return None
    return data
