"""Ranks that were stopped by a signal (SIGSTOP), when their run is to end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from llmsuite.launch.ranks import GRACE_SECONDS, Rank


class StoppedRanks:
    """The ranks that were stopped (SIGSTOP), when the run is to end: they would keep the others waiting."""

    def __init__(self, ranks: Sequence[Rank], first: int):
        self._ranks = ranks
        self._first = first
        self._since: float | None = None

    def resume(self, write: Callable[[str], None]) -> None:
        """Continue them by SIGCONT, the first time this is called while there are any."""
        if self._since is not None:
            return
        found = self._found()
        if not found:
            return
        self._since = time.monotonic()
        names = ", ".join(str(self._first + local) for local in found)
        write(f"stopped ranks are continued, so that the run can end: {names}\n")
        for local in found:
            self._ranks[local].send_signal(signal.SIGCONT)

    @property
    def stay_stopped(self) -> bool:
        """True where ranks are still stopped some time after `resume`."""
        return self._since is not None and time.monotonic() - self._since > GRACE_SECONDS and bool(self._found())

    def _found(self) -> list[int]:
        return [local for local, rank in enumerate(self._ranks) if rank.poll() is None and _is_stopped(rank.pid)]


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"
