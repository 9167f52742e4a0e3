"""Selection of the machines that make up a run: all of them, with spare machines instead of lost ones; or fewer, where
the recipe allows it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence, Set

from llmsuite.base.errors import UserError
from llmsuite.launch import rendezvous
from llmsuite.launch.ranks import Work


def _unchanged(count: int) -> Work:
    raise UserError(f"launch.min_nnodes: the work of a run with {count} machines is not known")


@dataclasses.dataclass(frozen=True)
class Membership:
    """The number of machines of a run, and the rule by which lost ones are replaced."""

    nnodes: int = 1
    spares: int = 0
    """Extra machines that wait to replace a lost one. Their numbers come after those of the others."""
    min_nnodes: int | None = None
    """Machines that are enough when lost ones do not come back; None for `nnodes` only."""
    rejoin_seconds: float = 60.0
    """Seconds to wait for a lost machine before the run continues with fewer."""
    work: Callable[[int], Work] = _unchanged
    """The work of each rank where the run continues with fewer machines, by their number. Raises UserError where the
    recipe cannot be run on that number."""

    @property
    def max_nodes(self) -> int:
        """Machines that take part, spares included."""
        return self.nnodes + self.spares

    def count(self, num_present: int) -> int:
        """The number of present machines that make up the run; 0 when there are too few."""
        if num_present >= self.nnodes:
            return self.nnodes
        for count in range(num_present, (self.min_nnodes or self.nnodes) - 1, -1):
            with contextlib.suppress(UserError):
                self.work(count)
                return count
        return 0

    def is_enough(self, num_present: int, is_one_due: bool, seconds: float) -> bool:
        """Decide if the run continues after a loss without the missing machines.

        Args:
            num_present: machines that have connected.
            is_one_due: one that was not lost has not connected yet.
            seconds: since the rendezvous started.
        """
        if is_one_due and seconds < rendezvous.SILENT_SECONDS:
            return False
        patient = self.min_nnodes is None or seconds < self.rejoin_seconds
        return num_present >= self.nnodes or (not patient and self.count(num_present) > 0)

    def assign(self, present: Set[int]) -> list[int]:
        """Machine numbers by node rank: each machine keeps its own rank where all ranks are taken."""
        count = self.count(len(present))
        if count < self.nnodes:
            return sorted(present)[:count]
        free = iter(sorted(number for number in present if number >= self.nnodes))
        return [number if number in present else next(free) for number in range(self.nnodes)]

    def describe(self, numbers: Sequence[int]) -> str:
        """A line about the machines that make up the run; empty when they are the usual ones."""
        names = ", ".join(map(str, numbers))
        if len(numbers) < self.nnodes:
            return f"the run continues with {len(numbers)} of {self.nnodes} machines: {names}"
        if [*numbers] != [*range(self.nnodes)]:
            return f"the run continues with machines {names}"
        return ""
