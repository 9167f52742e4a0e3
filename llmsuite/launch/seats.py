"""Which of the machines that are there make up a run: all places are taken, by spare machines where others were lost;
or fewer are, where the recipe allows it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence, Set

from llmsuite.errors import UserError
from llmsuite.launch import meeting
from llmsuite.launch.ranks import Work


def _unchanged(count: int) -> Work:
    raise UserError(f"launch.min_nnodes: nobody says what {count} machines do")


@dataclasses.dataclass(frozen=True)
class Seats:
    """How many machines a run takes."""

    nnodes: int = 1
    spares: int = 0
    """Machines beyond them that wait to take the place of a lost one. Their numbers come after those of the others."""
    fewest: int | None = None
    """Machines that are enough when lost ones do not come back; None for `nnodes` only."""
    rejoin_seconds: float = 60.0
    """How long the others wait for a lost machine before they go on with fewer."""
    work: Callable[[int], Work] = _unchanged
    """What each rank does where the run goes on with fewer machines, by their number. Raises UserError where the recipe
    cannot be run on so many."""

    @property
    def most(self) -> int:
        """Machines that take part, with those that wait."""
        return self.nnodes + self.spares

    def count(self, there: int) -> int:
        """How many of the machines that are there make up the run; 0 when they are too few."""
        if there >= self.nnodes:
            return self.nnodes
        for count in range(there, (self.fewest or self.nnodes) - 1, -1):
            with contextlib.suppress(UserError):
                self.work(count)
                return count
        return 0

    def are_enough(self, there: int, is_one_due: bool, seconds: float) -> bool:
        """Whether the run goes on after a loss without those who are missing.

        Args:
            there: machines that have come.
            is_one_due: whether one that was not lost is still on its way.
            seconds: since the meeting has begun.
        """
        if is_one_due and seconds < meeting.SILENT_SECONDS:
            return False
        patient = self.fewest is None or seconds < self.rejoin_seconds
        return there >= self.nnodes or (not patient and self.count(there) > 0)

    def take(self, there: Set[int]) -> list[int]:
        """The machines that make up the run, by their places: each its own where all places are taken."""
        count = self.count(len(there))
        if count < self.nnodes:
            return sorted(there)[:count]
        free = iter(sorted(number for number in there if number >= self.nnodes))
        return [number if number in there else next(free) for number in range(self.nnodes)]

    def said(self, numbers: Sequence[int]) -> str:
        """A line about those that make up the run; empty when they are the usual ones."""
        names = ", ".join(map(str, numbers))
        if len(numbers) < self.nnodes:
            return f"the run goes on with {len(numbers)} of {self.nnodes} machines: {names}"
        return f"the run goes on with machines {names}" if [*numbers] != [*range(self.nnodes)] else ""
