"""Counts of the rows of a data file that are not trained on, by reason."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    forgetful: int = 0
    """Number of rows with turns whose thoughts the chat template leaves out."""
    num_ranked: int = 0
    """Number of rows with ranked answers that are used."""
    num_pairs: int = 0
    """Number of samples that are pairs of their answers."""
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of other pairs of ranked answers, by the reason why they are not used."""
    sample_rows: list[int] | None = None
    """For each sample, the number of its row, where a row may have several; None where it is the next row that is not
    dropped."""
    places: Sequence[str] = ()
    """File and line of each row that could be read."""
    faults: Faults = dataclasses.field(default_factory=Faults)
    dropped_rows: dict[int, str] = dataclasses.field(default_factory=dict)
    """Numbers of the rows without a sample, as far as `drop` and `bad` received them, and the reasons."""
    bad_rows: set[int] = dataclasses.field(default_factory=set)
    """Numbers of those that are faulty."""
    part: str = ""
    """Description of the rows for messages, where they are a part of the file, such as " (held out)"."""

    def drop(self, reason: str, number: int | None = None) -> None:
        """Count a row without supervised tokens: row `number`, counted from 0."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if number is not None:
            self.dropped_rows[number] = reason

    def leave_out(self, reason: str) -> None:
        """Count a pair of ranked answers that is not used."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def bad(self, number: int, reason: str) -> None:
        """Record that row `number`, counted from 0, is faulty. Raises UserError unless faulty rows are skipped."""
        self.dropped_rows[number] = reason
        self.bad_rows.add(number)
        place = self.places[number] if self.places else f"{self.path}: row {number + 1}"
        self.faults.add(place, reason)
        self.faults.check()

    def add_samples(self, other: DropCounts) -> None:
        """Add the counts of other rows that were made into samples; they are counted as read or unread elsewhere."""
        self.dropped = dict(Counter(self.dropped) + Counter(other.dropped))
        self.left_out = dict(Counter(self.left_out) + Counter(other.left_out))
        self.cut += other.cut
        self.forgetful += other.forgetful
        self.num_ranked += other.num_ranked
        self.num_pairs += other.num_pairs

    def to_json(self) -> dict[str, Any]:
        """Return the counts, without places and faults, as fields for the constructor."""
        return {
            "read": self.read, "unread": self.unread, "dropped": self.dropped, "cut": self.cut,
            "forgetful": self.forgetful, "num_ranked": self.num_ranked, "num_pairs": self.num_pairs,
            "left_out": self.left_out,
        }  # fmt: skip

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

    def of_ranked(self) -> str | None:
        """Return what became of the rows with ranked answers; None without any."""
        if not (self.num_ranked or self.left_out):
            return None
        text = f"{self.num_ranked} rows with ranked answers make {self.num_pairs} pairs"
        left_out = [f"{count} {reason}" for reason, count in sorted(self.left_out.items())]
        if left_out:
            return f"{text}; pairs that are left out: {'; '.join(left_out)}"
        return text

    def check(self, report: Callable[[str], None]) -> None:
        """Report the counts. Raises UserError when no row is left."""
        reasons = "; ".join(self.reasons())
        if self.lost == self.total:
            raise UserError(f"{self.path}{self.part}: none of its {self.total} rows can train anything: {reasons}")
        text = f"{self.path}{self.part}: {self.total - self.lost} of {self.total} rows are used"
        report(f"{text}; dropped: {reasons}" if self.lost else text)
        ranked = self.of_ranked()
        if ranked is not None:
            report(f"{self.path}: {ranked}")
