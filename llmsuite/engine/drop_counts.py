"""Counts of the rows of a data file that are not trained on, by reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.data.faults import Faults


@dataclasses.dataclass
class DropCounts:
    """Counts of the rows that are not trained on, by reason: valid rows that are dropped, and faulty rows."""

    path: Path
    read: int = 0
    """Number of rows that could be read."""
    unread: int = 0
    """Number of rows that could not be read."""
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of valid rows that are dropped, by reason."""
    cut: int = 0
    """Number of rows that are truncated."""
    places: Sequence[str] = ()
    """File and line of each row that could be read."""
    faults: Faults = dataclasses.field(default_factory=Faults)
    dropped_rows: set[int] = dataclasses.field(default_factory=set)
    """Numbers of the rows without a sample, as far as `drop` and `bad` received them."""
    part: str = ""
    """Description of the rows for messages, where they are a part of the file, such as " (held out)"."""

    def drop(self, reason: str, number: int | None = None) -> None:
        """Count a row without supervised tokens: row `number`, counted from 0."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if number is not None:
            self.dropped_rows.add(number)

    def bad(self, number: int, reason: str) -> None:
        """Record that row `number`, counted from 0, is faulty. Raises UserError unless faulty rows are skipped."""
        self.dropped_rows.add(number)
        place = self.places[number] if self.places else f"{self.path}: row {number + 1}"
        self.faults.add(place, reason)
        self.faults.check()

    @property
    def total(self) -> int:
        """Number of rows of the file, readable or not."""
        return self.read + self.unread

    @property
    def lost(self) -> int:
        """Number of rows that are not used."""
        return sum(self.dropped.values()) + self.faults.total

    def reasons(self) -> list[str]:
        """Return the reasons for which rows are not used, each with the number of rows."""
        dropped = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
        return [*dropped, self.faults.summary()] if self.faults.total else dropped

    def check(self, report: Callable[[str], None]) -> None:
        """Report the counts. Raises UserError when no row is left."""
        reasons = "; ".join(self.reasons())
        if self.lost == self.total:
            raise UserError(f"{self.path}{self.part}: none of its {self.total} rows can train anything: {reasons}")
        text = f"{self.path}{self.part}: {self.total - self.lost} of {self.total} rows are used"
        report(f"{text}; dropped: {reasons}" if self.lost else text)
