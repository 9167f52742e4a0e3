"""Whether the ranks of a run are started again after one was lost, and how often.

Lost is a rank that was killed or raised an error, a machine that is gone, a run that hangs. What the user has to mend
and what the user has stopped is none of these. A run that is lost at the same place again would be lost there for ever.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from llmsuite.launch.ends import INTERRUPTED, REFUSED, End, end_from

ENVIRONMENT = "LLMSUITE_RESTART"
"""Set by the launcher in its ranks: how often they have been started again."""


def is_restarted() -> bool:
    """Whether this rank takes the place of one that was lost, and so goes on from the last checkpoint."""
    return os.environ.get(ENVIRONMENT, "0") != "0"


@dataclasses.dataclass(frozen=True)
class Loss:
    """An end of the ranks that a restart may mend."""

    end: End
    begins_at: int
    """The step that the ranks would go on from, that of the newest checkpoint."""
    step: int
    """The step they were in, 0 before the first."""

    def is_at_same_place(self, before: Loss) -> bool:
        """Whether nothing was won since another loss: there is no new checkpoint, and it was the same step that ended
        the ranks, or not one step was done. A machine or the network may fail at any place, at the same by accident."""
        if self.end.of_machine or before.end.of_machine:
            return False
        same_step, no_step = self.step == before.step, self.step <= self.begins_at + 1
        return self.begins_at == before.begins_at and (same_step or no_step)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What follows from the end of all ranks."""

    end: End | None
    """The end of the run; None when its ranks are started again."""
    count: int
    """Restarts of the run so far, with this one."""
    said: str = ""
    """A line about it."""
    begins_at: int = 0
    """The step that the ranks go on from."""
    why: str = ""
    """What they are started again for."""

    def as_message(self) -> dict[str, Any]:
        """JSON data that `from_message` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, message: Any) -> Decision | None:
        """The decision that another launcher tells of; None for anything else."""
        try:
            end = None if message["end"] is None else end_from(message["end"])
            found = cls(
                end, int(message["count"]), str(message["said"]), int(message["begins_at"]), str(message["why"])
            )
        except (TypeError, KeyError, ValueError):
            return None
        return None if end is None and message["end"] is not None else found


class Restarts:
    """The losses of a run so far, seen from one launcher."""

    def __init__(
        self,
        most: int = 0,
        begins_at: Callable[[], int] = lambda: 0,
        note: Callable[[Decision], None] = lambda decision: None,
        unit: str = "step",
    ):
        """
        Args:
            most: restarts after which another loss ends the run (`launch.max_restarts`).
            begins_at: the step that ranks would go on from, by the checkpoints that are there.
            note: records a restart, on machine 0.
            unit: what `begins_at` counts.
        """
        self.most, self.note = most, note
        self._begins_at, self._unit = begins_at, unit
        self._last: Loss | None = None

    def after(self, end: End, step: int, count: int) -> Decision:
        """What follows from the end of all ranks.

        Args:
            end: how they ended.
            step: the training step they were in; 0 before the first.
            count: restarts so far.
        """
        if end.code in (0, REFUSED, INTERRUPTED) or not self.most:
            return Decision(end, count)
        loss, before = Loss(end, self._begins_at(), step), self._last
        self._last = loss
        if before is not None and loss.is_at_same_place(before):
            said = f"lost at the same place again, which no restart mends; the first time: {before.end.why}"
            return Decision(before.end, count, said)
        if count >= self.most:
            return Decision(end, count, f"no restart is left of {self.most} (launch.max_restarts): {end.why}")
        begins_at = loss.begins_at
        said = f"restart {count + 1} of {self.most}, from {self._unit} {begins_at}: {end.why}"
        return Decision(None, count + 1, said, begins_at, end.why)
