"""Writes the tables of the benchmarks into docs/notes/results.md, each between two markers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "notes" / "results.md"


def write(name: str, lines: Sequence[str]) -> None:
    """Replace the lines between the markers of this name."""
    begin = f"<!-- generated: {name} -->"
    end = f"<!-- end of generated: {name} -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    assert end in rest, f"{PAGE} has no place for the table {name}"
    PAGE.write_text("\n".join([before + begin, "", *lines, "", end]) + rest.partition(end)[2], encoding="utf-8")


def processor() -> str:
    """Name of this machine's processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
