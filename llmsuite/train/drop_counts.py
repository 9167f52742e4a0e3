"""Rows of a data file that are not trained on, by reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from llmsuite.data.faults import Faults
from llmsuite.errors import UserError


@dataclasses.dataclass
class DropCounts:
    """Rows that are not trained on, by reason: valid ones that are dropped, and faulty ones."""

    path: Path
    read: int = 0
    """Rows that could be read."""
    unread: int = 0
    """Rows that could not."""
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    cut: int = 0
    """Rows that are truncated."""
    places: Sequence[str] = ()
    """File and line of each row that could be read."""
    faults: Faults = dataclasses.field(default_factory=Faults)
    left_out: set[int] = dataclasses.field(default_factory=set)
    """Numbers of the rows without a sample, as far as they were told."""

    def drop(self, reason: str, number: int | None = None) -> None:
        """Count a row that trains nothing: row `number`, counted from 0."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if number is not None:
            self.left_out.add(number)

    def bad(self, number: int, reason: str) -> None:
        """Row `number`, counted from 0, is faulty. Raises UserError unless such rows are skipped."""
        self.left_out.add(number)
        self.faults.add(self.places[number] if self.places else f"{self.path}: row {number + 1}", reason)
        self.faults.check()

    @property
    def total(self) -> int:
        """Rows of the file, whether they could be read or not."""
        return self.read + self.unread

    @property
    def lost(self) -> int:
        """Rows that are not used."""
        return sum(self.dropped.values()) + self.faults.total

    def reasons(self) -> list[str]:
        """The reasons for which rows are not used, each with the number of rows."""
        dropped = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
        return [*dropped, self.faults.summary()] if self.faults.total else dropped

    def check(self, report: Callable[[str], None]) -> None:
        """Report the counts. Raises UserError when no row is left."""
        reasons = "; ".join(self.reasons())
        if self.lost == self.total:
            raise UserError(f"{self.path}: none of its {self.total} rows can train anything: {reasons}")
        text = f"{self.path}: {self.total - self.lost} of {self.total} rows are used"
        report(f"{text}; dropped: {reasons}" if self.lost else text)
