"""Rows that cannot be read: errors, or counted by reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from llmsuite.errors import UserError

OnBadRow = Literal["error", "skip"]
_MAX_REPORTED = 10


class Faults:
    """Rows that cannot be read: they stop the run, or are counted by reason, as `data.on_bad_row` says."""

    def __init__(self, on_bad_row: OnBadRow = "error"):
        self.skips = on_bad_row == "skip"
        self.counts: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._messages: list[str] = []
        self._said: set[str] = set()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, where: str, reason: str, once: bool = False) -> None:
        """Record the fault of a row; `once` where the recipe may be at fault, and all rows then have it: the others of
        them are counted and not shown."""
        # faults are counted by reason, without the details, which differ from row to row
        kind = re.sub(r"(?<![\w-])\d+", "N", re.split(r": |; | \(", reason)[0]) if self.skips else reason
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._first.setdefault(kind, where)
        if len(self._messages) < _MAX_REPORTED and not (once and reason in self._said):
            self._said.add(reason)
            self._messages.append(f"{where}: {reason}")

    def check(self) -> None:
        """Raises UserError with the first faults, unless they are to be skipped."""
        if self._messages and not self.skips:
            left = self.total - len(self._messages)
            more = f"\nand {left} more" if left else ""
            raise UserError("\n".join(self._messages) + more)

    def summary(self) -> str:
        """A line such as "3 that cannot be read: is not a JSON line (3, first at rows.jsonl:7)"."""
        reasons = (f"{kind} ({count}, first at {self._first[kind]})" for kind, count in sorted(self.counts.items()))
        return f"{self.total} that cannot be read: {', '.join(reasons)}"

    def noted(self, path: Path) -> dict[str, tuple[int, str]]:
        """The faults that were skipped in a file, by reason: their number and the place of the first. For `of_note`."""
        return {kind: (count, self._first[kind].removeprefix(str(path))) for kind, count in self.counts.items()}

    @classmethod
    def of_note(cls, noted: Mapping[str, tuple[int, str]], path: Path) -> Faults:
        """The faults that `noted` has recorded for a file with the same content."""
        faults = cls("skip")
        faults.counts = {kind: count for kind, (count, _) in noted.items()}
        faults._first = {kind: f"{path}{place}" for kind, (_, place) in noted.items()}
        return faults
