"""Faults of rows: they stop the run, or are counted by reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from llmsuite.base.errors import UserError

OnBadRow = Literal["error", "skip"]
_MAX_REPORTED = 10


class Faults:
    """Rows that cannot be read. They stop the run, or are counted by reason, as `data.on_bad_row` selects."""

    def __init__(self, on_bad_row: OnBadRow = "error"):
        self.skips = on_bad_row == "skip"
        self.counts: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._messages: list[str] = []
        self._shown: set[str] = set()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, where: str, reason: str, once: bool = False) -> None:
        """Record the fault of a row.

        Args:
            where: place of the row.
            reason: the fault.
            once: show a reason for one row only, and count the others: for faults that may be those of the recipe, as
                all rows then have them.
        """
        kind = reason
        if self.skips:  # faults are counted by reason, without the details, which differ from row to row
            kind = re.sub(r"(?<![\w-])\d+", "N", re.split(r": |; | \(", reason)[0])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._first.setdefault(kind, where)
        if len(self._messages) < _MAX_REPORTED and not (once and reason in self._shown):
            self._shown.add(reason)
            self._messages.append(f"{where}: {reason}")

    def check(self) -> None:
        """Raise UserError with the first faults, unless they are to be skipped."""
        if self._messages and not self.skips:
            left = self.total - len(self._messages)
            more = f"\nand {left} more" if left else ""
            raise UserError("\n".join(self._messages) + more)

    def summary(self) -> str:
        """Return a line such as "3 that cannot be read: is not a JSON line (3, first at rows.jsonl:7)"."""
        reasons = (f"{kind} ({count}, first at {self._first[kind]})" for kind, count in sorted(self.counts.items()))
        return f"{self.total} that cannot be read: {', '.join(reasons)}"

    def to_json(self, path: Path) -> dict[str, tuple[int, str]]:
        """Return the skipped faults of a file by reason: their number and the place of the first. For `from_json`."""
        return {kind: (count, self._first[kind].removeprefix(str(path))) for kind, count in self.counts.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, tuple[int, str]], path: Path) -> Faults:
        """Restore faults from `to_json` for a file with the same content."""
        faults = cls("skip")
        faults.counts = {kind: count for kind, (count, _) in data.items()}
        faults._first = {kind: f"{path}{place}" for kind, (_, place) in data.items()}
        return faults
