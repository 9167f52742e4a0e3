"""Explains a hang: which rank waits in which call, which rank has not reached it, and which calls differ.

The launcher uses it when nothing has happened in any rank for a while, and when a rank has failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmsuite.base.files import os_errors
from llmsuite.base.safe_files import is_file
from llmsuite.launch.calls import Call, progress, read
from llmsuite.launch.ranks import Rank

STALLED = 3
"""Exit code of a run that hangs."""
_START_FACTOR = 3.0
_STACK_SECONDS = 3.0
_MAX_STACK_BYTES = 1 << 26
_STACK_LINES = 30
_LOOK_SECONDS = 0.05
_MESSAGES = ("send", "receive")


class HangDetector:
    """Detects a hang of the ranks of this machine, from their recorded events."""

    def __init__(self, directory: Path, ranks: Sequence[int], seconds: float | None):
        """
        Args:
            directory: the recordings of the ranks, see `calls`.
            ranks: of this machine.
            seconds: a run hangs when nothing has happened in any rank for this long; three times as long until every
                rank is in its second step, since loading and compiling take time. None for never.
        """
        self._directory = directory
        self._ranks = list(ranks)
        self._seconds = seconds
        self._seen: list[tuple[int, int]] = []
        self._since = time.monotonic()

    def is_stalled(self) -> bool:
        """True when the run hangs. To be called often."""
        if self._seconds is None:
            return False
        now = [progress(self._directory / f"{rank}.calls") for rank in self._ranks]
        if now != self._seen or not any(events for events, _ in now):
            self._seen = now
            self._since = time.monotonic()
            return False
        return time.monotonic() - self._since > self.limit

    @property
    def limit(self) -> float:
        """Seconds without any event after which the run counts as hanging, at its present step."""
        at_start = not self._seen or min(step for _, step in self._seen) < 2
        return (self._seconds or 0.0) * (_START_FACTOR if at_start else 1.0)

    def calls(self) -> dict[int, list[Call]]:
        """The last calls of each rank here."""
        return {rank: read(self._directory / f"{rank}.calls") for rank in self._ranks}

    @property
    def step(self) -> int:
        """The highest training step that the ranks here are in; 0 before the first."""
        return max(progress(self._directory / f"{rank}.calls")[1] for rank in self._ranks)

    def is_recording(self, rank: int) -> bool:
        """True where a rank is recording; then it prints its stacks on SIGUSR1."""
        return progress(self._directory / f"{rank}.calls") != (0, 0)


def differences(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Calls in which the ranks of a group differ, the earliest one first.

    Args:
        calls: the last calls of each known rank.
    """
    met: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, made in calls.items():
        for call in made:
            met.setdefault((call.group, call.number), {})[rank] = call
    reported = set()
    for (group, _), by_rank in sorted(met.items(), key=lambda item: max(call.began for call in item[1].values())):
        kinds: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted(by_rank):
            kinds.setdefault(_kind(by_rank[rank]), []).append(rank)
        if len(kinds) > 1 and group not in reported:  # later differences follow from the first one
            reported.add(group)
            parts = [f"{_name(ranks)} {_makes(ranks)} {by_rank[ranks[0]]}" for ranks in kinds.values()]
            yield "; ".join(parts)


def _kind(call: Call) -> tuple[str, ...]:
    what = "message" if call.what in _MESSAGES else call.what
    return what, call.shape, call.dtype, str(call.step)


@dataclasses.dataclass(frozen=True)
class MissingCall:
    """A call that a rank has not reached, while others wait in it."""

    rank: int
    waiting: tuple[int, ...]
    call: Call


def missing(calls: Mapping[int, Sequence[Call]]) -> list[MissingCall]:
    """The calls that ranks wait in and others have not reached; for each rank at most the earliest one."""
    reached = {}
    waits = {}
    for rank, made in calls.items():
        reached[rank] = {call.group: call.number for call in made}
        call = _pending_call(made)
        if call is not None:
            waits[rank] = call
    found: dict[int, MissingCall] = {}
    for _, call in sorted(waits.items(), key=lambda item: item[1].began):
        for rank in call.ranks:
            if rank in calls and reached[rank].get(call.group, 0) < call.number and rank not in found:
                waiting = tuple(r for r, c in waits.items() if (c.group, c.number) == (call.group, call.number))
                found[rank] = MissingCall(rank, waiting, call)
    return sorted(found.values(), key=lambda m: m.rank)


def left_early(calls: Mapping[int, Sequence[Call]], ended: Sequence[int]) -> Iterator[str]:
    """Ranks that have ended with exit code 0, and the call of others that they never made.

    Args:
        calls: the last calls of each known rank.
        ended: ranks whose exit code is 0.
    """
    for rank in ended:
        made = {call.group: call.number for call in calls.get(rank, ())}
        waits = [c for other in calls.values() for c in other if rank in c.ranks and c.number > made.get(c.group, 0)]
        if waits:
            call = min(waits, key=lambda found: found.began)
            yield f"rank {rank} has left with exit code 0 before {call}, which the others have made"


def _pending_call(made: Sequence[Call]) -> Call | None:
    """The call a rank waits in. Sends do not count: other threads make them."""
    return next((call for call in reversed(made) if not call.ended and call.what != "send"), None)


def explain(calls: Mapping[int, Sequence[Call]], now: float) -> tuple[list[str], list[int]]:
    """A description of what each rank does, and where they diverge.

    Args:
        calls: the last calls of each known rank.
        now: seconds since the epoch.

    Returns:
        Lines of text, and the ranks whose stacks are worth showing.
    """
    lines = []
    for rank, made in sorted(calls.items()):
        inside = _pending_call(made)
        if inside is not None:
            lines.append(f"rank {rank}: has waited for {now - inside.began:.1f} s in {inside}")
        elif made:
            last = f"{now - max(call.ended for call in made):.1f} s ago: {made[-1]}"
            lines.append(f"rank {rank}: is in no recorded call; its last call ended {last}")
        else:
            lines.append(f"rank {rank}: has made no call yet")
    differing_sections = list(differences(calls))
    absent = missing(calls)
    culprits = [m for m in absent if _pending_call(calls[m.rank]) is None]
    lines += [f"first difference: {text}" for text in differing_sections[:1]]
    for m in culprits:
        lines.append(f"rank {m.rank} has not reached {m.call}, in which {_name(m.waiting)} {_waits(m.waiting)}")
    if absent and not culprits and not differing_sections:
        lines.append("ranks wait for each other; one has skipped a call, or makes its calls in another order:")
        lines += [
            f"  rank {m.rank} has not reached the call that {_name(m.waiting)} {_waits(m.waiting)} in" for m in absent
        ]
    known = set(calls)
    unknown = sorted({rank for made in calls.values() for call in made for rank in call.ranks} - known)
    if unknown:
        lines.append(f"no calls are recorded here for {_name(unknown)}")
    return lines, [m.rank for m in culprits] or sorted(calls)


def _name(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def _makes(ranks: Sequence[int]) -> str:
    return "makes" if len(ranks) == 1 else "make"


def _waits(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def stacks(processes: Mapping[int, Rank], log_dir: Path) -> dict[int, str]:
    """The Python stack of each rank's main thread, the innermost call first; it is written to the rank's log too."""
    logs = {rank: log for rank in processes if is_file(log := log_dir / f"workerlog.{rank}")}
    before = {rank: log.stat().st_size for rank, log in logs.items()}
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_SECONDS
    found: dict[int, str] = {}
    while time.monotonic() < deadline and len(found) < len(logs):
        time.sleep(_LOOK_SECONDS)
        for rank, log in logs.items():
            with open(log, "rb") as file:
                file.seek(before[rank])
                text = file.read(_MAX_STACK_BYTES).decode(errors="replace")
            # the main thread comes last, and its last line is that of the program itself
            if rank not in found and "<module>" in text:
                frames = text[text.rfind("(most recent call first):") :].splitlines()[1:]
                own = itertools.takewhile(lambda frame: "multiprocessing/process.py" not in frame, frames)  # of a fork
                found[rank] = "\n".join(list(own)[:_STACK_LINES])
    return found


def write_calls(calls: Mapping[int, Sequence[Call]], log_dir: Path) -> None:
    """Write the last calls of each rank next to its log. Raises UserError when they cannot be written."""
    for rank, made in calls.items():
        text = "".join(json.dumps(dataclasses.asdict(call)) + "\n" for call in made)
        path = log_dir / f"calls.{rank}.jsonl"
        unfinished = path.with_suffix(".part")
        with os_errors(path, "the last calls of ranks are not all there"):
            unfinished.write_text(text)
            unfinished.replace(path)  # atomic: other machines read it as soon as it exists


def forget_calls(rank: int, log_dir: Path) -> None:
    """Remove the file of `write_calls` for a rank that is started again: a second stall may come soon."""
    with contextlib.suppress(OSError):
        (log_dir / f"calls.{rank}.jsonl").unlink()


def read_written(log_dir: Path, since: float) -> dict[int, list[Call]]:
    """The calls that `write_calls` has written since a time (seconds since the epoch), on all machines that share the
    directory."""
    found = {}
    for path in log_dir.glob("calls.*.jsonl"):
        if path.stat().st_mtime >= since:
            records = [json.loads(line) for line in path.read_text().splitlines()]
            found[int(path.name.split(".")[1])] = [Call(**{**r, "ranks": tuple(r["ranks"])}) for r in records]
    return found
