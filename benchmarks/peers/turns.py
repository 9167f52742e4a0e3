"""A worker's side of taking turns: it does as many steps as it is told to, then waits. Needs nothing but Python."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

MARK = "TURN "


class Turns:
    """Counts the steps of a training loop that calls `wait`, and holds it between them.

    On stdin comes a number of steps. When they are done, and once before the first, a line goes to stdout: how long
    they have taken in all, by the clock and of CPU time, the losses the loop has told, and the peak of resident memory
    so far.
    """

    def __init__(self) -> None:
        self._left = 0
        self._since = (time.perf_counter(), time.process_time())
        self.losses: list[float] = []
        self.lengths: list[float] = []
        """Mean number of tokens of each step's completions, in a task that draws some."""

    def wait(self) -> None:
        """Called between two steps, and before the first one."""
        if self._left:
            self._left -= 1
        if self._left:
            return
        self._tell()
        line = sys.stdin.readline()
        if not line:  # nobody is there any more
            sys.exit(0)
        self._left = int(line)
        self.losses = []
        self.lengths = []
        self._since = (time.perf_counter(), time.process_time())

    def _tell(self) -> None:
        clock, cpu = self._since
        result = {
            "seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu,
            "losses": self.losses, "lengths": self.lengths, "peak_bytes": _peak_bytes(),
        }  # fmt: skip
        print("\n" + MARK + json.dumps(result), flush=True)


class TakeTurns:
    """What transformers and PaddleNLP call between steps: there the trainer waits, and what it logs of a step comes
    before the next one. Goes in front of their own base class of callbacks."""

    def __init__(self) -> None:
        self.turns = Turns()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.turns.wait()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.turns.losses.append(float(logs["loss"]))
        if "completions/mean_length" in logs:
            self.turns.lengths.append(float(logs["completions/mean_length"]))


def _peak_bytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
