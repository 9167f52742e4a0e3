"""The restart policy: decides if the ranks of a run are started again after a loss.

A loss is a rank that was killed or raised an error, a machine that was lost, a run that hangs; an error in the user's
input and a run that the user has stopped are not. A run that is lost twice at the same step is not restarted again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from llmsuite.launch.ends import INTERRUPTED, REFUSED, End, parse_end

ENVIRONMENT = "LLMSUITE_RESTART"
"""Environment variable that the launcher sets in its ranks: the number of restarts so far."""


def is_restarted() -> bool:
    """True where this rank replaces one that was lost, and so resumes from the last checkpoint."""
    return os.environ.get(ENVIRONMENT, "0") != "0"


@dataclasses.dataclass(frozen=True)
class Loss:
    """An end of the ranks after which a restart may help."""

    end: End
    begins_at: int
    """The step that the ranks would resume from, that of the newest checkpoint."""
    step: int
    """The step they were in, 0 before the first."""

    def is_at_same_place(self, before: Loss) -> bool:
        """True where no progress was made since another loss: there is no new checkpoint, and the ranks ended in the
        same step, or no step was done. A lost machine or network may fail in the same step by accident: then False."""
        if self.end.of_machine or before.end.of_machine:
            return False
        same_step = self.step == before.step
        no_step = self.step <= self.begins_at + 1
        return self.begins_at == before.begins_at and (same_step or no_step)


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision after the end of all ranks."""

    end: End | None
    """The end of the run; None when its ranks are started again."""
    count: int
    """Restarts of the run so far, with this one."""
    message: str = ""
    """A line about it."""
    begins_at: int = 0
    """The step that the ranks resume from."""
    why: str = ""
    """The reason for the restart."""

    def as_message(self) -> dict[str, Any]:
        """JSON data for `from_message`."""
        fields = dataclasses.asdict(self)
        fields["said"] = fields.pop("message")
        return fields

    @classmethod
    def from_message(cls, message: Any) -> Decision | None:
        """The decision that another launcher has sent; None for anything else."""
        try:
            end = None
            if message["end"] is not None:
                end = parse_end(message["end"])
            found = cls(
                end, int(message["count"]), str(message["said"]), int(message["begins_at"]), str(message["why"])
            )
        except (TypeError, KeyError, ValueError):
            return None
        if end is None and message["end"] is not None:
            return None
        return found


class Restarts:
    """The losses of a run so far, seen from one launcher."""

    def __init__(
        self,
        max_restarts: int = 0,
        begins_at: Callable[[], int] = lambda: 0,
        note: Callable[[Decision], None] = lambda decision: None,
        unit: str = "step",
    ):
        """
        Args:
            max_restarts: restarts after which another loss ends the run (`launch.max_restarts`).
            begins_at: the step that ranks would resume from, by the checkpoints that exist.
            note: records a restart, on machine 0.
            unit: what `begins_at` counts.
        """
        self.max_restarts = max_restarts
        self.note = note
        self._begins_at = begins_at
        self._unit = unit
        self._last: Loss | None = None

    def after(self, end: End, step: int, count: int) -> Decision:
        """Decide after the end of all ranks.

        Args:
            end: how they ended.
            step: the training step they were in; 0 before the first.
            count: restarts so far.
        """
        if end.code in (0, REFUSED, INTERRUPTED) or not self.max_restarts:
            return Decision(end, count)
        loss = Loss(end, self._begins_at(), step)
        before = self._last
        self._last = loss
        if before is not None and loss.is_at_same_place(before):
            message = (
                f"lost at the same step again, so another restart would not help; the first time: {before.end.why}"
            )
            return Decision(before.end, count, message)
        if count >= self.max_restarts:
            return Decision(end, count, f"no restart is left of {self.max_restarts} (launch.max_restarts): {end.why}")
        begins_at = loss.begins_at
        message = f"restart {count + 1} of {self.max_restarts}, from {self._unit} {begins_at}: {end.why}"
        return Decision(None, count + 1, message, begins_at, end.why)
