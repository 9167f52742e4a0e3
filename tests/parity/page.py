"""Writes what a whole run has measured into docs/notes/parity.md, between two markers."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "notes" / "parity.md"


def write(name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Replace the table between the markers of this name."""
    begin = f"<!-- generated: {name} -->"
    end = f"<!-- end of generated: {name} -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    assert end in rest, f"{PAGE} has no place for the table {name}"
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|---" * len(columns) + "|")
    PAGE.write_text("\n".join([before + begin, "", *lines, "", end]) + rest.partition(end)[2], encoding="utf-8")
