"""Sends Ctrl-C to runs and commands at random moments, once or twice: each ends by it, quietly, and leaves nothing.

python -m tests.tools.interrupts [--moments N] [--seed SEED]

A moment lies anywhere between the first line of `llmsuite` and the end of what it does, imports included; the second
signal comes up to half a second after the first. The exit code has to be 130 (or that of a command that had ended), the
last event of a run `stopped`, nothing printed that looks like a fault, no process left; a run goes on with --resume.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.multi.conftest import Runner
from tests.support.moments import MESHES, STAGES, Case
from tests.tools.faults import MARK, Wrong, wait_for_all

INTERRUPTED = 130
MOST_SECONDS = 120.0
"""From the last signal to the end: after a single one a run finishes its step and saves."""
LONGEST_GAP = 0.5
"""Seconds between two signals."""
COMMAND_SHARE = 0.2
ONCE_SHARE = 0.3
RESUMED_SHARE = 0.25
_FAULT = re.compile(r"Traceback|Error\b|has failed|was killed by")
_CATCHES_ALARM = 1 << (signal.SIGALRM - 1)
"""In the mask of signals that a process catches: `llmsuite.__main__` has begun to mind Ctrl-C."""


class Interrupts:
    """A series of interruptions."""

    def __init__(self, directory: Path, seed: int):
        self.runner = Runner(directory)
        self.chance = random.Random(seed)
        self.directory = directory
        self.seconds: dict[str, float] = {}
        """How long each run or command takes that is left alone."""
        self.seen: collections.Counter[str] = collections.Counter()

    def one(self, number: int) -> str:
        """Interrupt a run or a command; returns what was done.

        Raises:
            Wrong: it did not end as it should.
        """
        is_run = self.chance.random() >= COMMAND_SHARE
        place = self.directory / f"interrupted-{number}"
        if is_run:
            case = Case(self.chance.choice(list(STAGES)), self.chance.choice(list(MESHES)))
            name = case.name
            words = case.words(place)
            self._learn(name, case.words(self.directory / f"whole-{name}"))
        else:
            name = self.chance.choice(["merge", "export", "generate", "validate"])
            words = self._command(name, place)
            self._learn(name, self._command(name, self.directory / f"whole-{name}"))
        delay = self.chance.uniform(0, self.seconds[name])
        gap = None if self.chance.random() < ONCE_SHARE else self.chance.uniform(0, LONGEST_GAP)
        again = "" if gap is None else f", again {gap:.2f} s later"
        what = f"{name} at {delay:.2f} of {self.seconds[name]:.1f} s{again}"
        try:
            code = self._interrupt(words, delay, gap)
            if is_run:
                self._check_events(place, code)
                if code and place.exists() and self.chance.random() < RESUMED_SHARE:
                    self._resume(words, place)
        except Wrong as error:
            raise Wrong(f"{what}: {error}") from None
        finally:
            shutil.rmtree(place, ignore_errors=True)
        self.seen["had ended" if code == 0 else "once" if gap is None else "twice"] += 1
        return f"{what}: exit code {code}"

    def _command(self, name: str, place: Path) -> list[str]:
        """The words of a command that takes the model of a run that was left alone."""
        case = Case("sft", "alone")
        model = self.directory / f"whole-{case.name}"
        self._learn(case.name, case.words(model))
        return {
            "merge": ["merge", str(model), "-o", str(place)],
            "export": ["export", str(model), "-o", str(place)],
            "generate": ["generate", str(model), "--prompt", "Hi", "--max_new_tokens", "8"],
            "validate": ["validate", "recipes/llama/sft.json"],
        }[name]

    def _start(self, words: list[str]) -> tuple[subprocess.Popen[str], str]:
        """Start a command, and wait until it minds Ctrl-C; returns it and its mark."""
        mark = uuid.uuid4().hex
        process = self.runner.start(*words, **{MARK: mark})
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + MOST_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
            if caught is not None and int(caught[1], 16) & _CATCHES_ALARM:
                break
            time.sleep(0.001)
        return process, mark

    def _learn(self, name: str, words: list[str]) -> None:
        """Run something that is left alone, the first time."""
        if name in self.seconds:
            return
        process, mark = self._start(words)
        begun = time.monotonic()
        output = wait_for_all(process, mark, MOST_SECONDS)
        if process.returncode != 0:
            raise Wrong(f"lost: {name}: exit code {process.returncode} without a signal\n{output}")
        self.seconds[name] = time.monotonic() - begun

    def _interrupt(self, words: list[str], delay: float, gap: float | None) -> int:
        """The exit code of a command that gets a signal after some seconds, and another one after a gap."""
        process, mark = self._start(words)
        for seconds in (delay, gap):
            if seconds is not None:
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGINT)
        output = wait_for_all(process, mark, MOST_SECONDS)
        if process.returncode not in (0, INTERRUPTED) or _FAULT.search(output):
            raise Wrong(f"lost: exit code {process.returncode}\n{output}")
        return process.returncode

    def _check_events(self, run: Path, code: int) -> None:
        """Raise Wrong unless the last event of a run says how it has ended. One that had not begun has none."""
        path = run / "events.jsonl"
        events = [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []
        if events and events[-1] != ("stopped" if code else "ended"):
            raise Wrong(f"lost: exit code {code}, and its events are {events}")

    def _resume(self, words: list[str], run: Path) -> None:
        """Let a run go on; raises Wrong where it cannot. Without a checkpoint it begins again in a new directory."""
        if not (run / "checkpoints" / "latest").exists():
            shutil.rmtree(run)
        else:
            words = [*words, "--resume"]
        process, mark = self._start(words)
        output = wait_for_all(process, mark, MOST_SECONDS)
        if process.returncode != 0:
            raise Wrong(f"lost: exit code {process.returncode} of {words[-1]}\n{output}")
        self._check_events(run, 0)
        self.seen["gone on"] += 1


def main(moments: int, seed: int) -> int:
    """Report each moment; returns how many went wrong."""
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        series = Interrupts(Path(directory), seed)
        for number in range(1, moments + 1):
            try:
                said = series.one(number)
            except Wrong as error:
                bad += 1
                said = f"seed {seed}: {error}"
            print(f"{number}/{moments}: {said}", flush=True)
    seen = ", ".join(f"{count} {what}" for what, count in sorted(series.seen.items()))
    print(f"{moments - bad} of {moments} moments (seed {seed}) ended well: {seen}")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    sys.exit(1 if main(given.moments, given.seed) else 0)
