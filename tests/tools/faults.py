"""Launches eight processes again and again: every launch has to end well and leave nobody behind.

python -m tests.tools.faults [LAUNCHES]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.multi.conftest import Runner

STEPS = 2
MARK = "LLMSUITE_TEST_RUN"
"""Variable by whose value `marked` finds the processes of a run."""
ORPHAN_SECONDS = 15.0
"""In which all that a command has started has to end behind it."""
PARALLEL = '{"tensor_parallel_degree":2,"pipeline_parallel_degree":2,"sequence_parallel":true,"sharding":"stage2"}'


class Wrong(Exception):
    """What should not be: "lost", "orphan" or "stale", and what it is."""


def main(launches: int) -> int:
    """Report each launch; returns how many did not end well."""
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(Path(directory))
        for number in range(1, launches + 1):
            name = f"launch-{number}"
            start = time.monotonic()
            words = ("--launch.num_devices=8", f"--parallel={PARALLEL}", "--train.global_batch_size=8")
            more = (f"--train.max_steps={STEPS}", "--train.micro_batch_size=2", "--data.eval=null")
            process = runner.start(*runner.smoke(name, *words, *more))
            output, _ = process.communicate()
            left = ranks_of(Path(directory) / name)
            well = process.returncode == 0 and not left and len(runner.metrics(name)) == STEPS
            bad += not well
            verdict = "ended well" if well else f"exit code {process.returncode}, left: {left}\n{output}"
            print(f"{number}/{launches}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{launches - bad} of {launches} launches ended well")
    return bad


def ranks_of(run: Path) -> list[int]:
    """Processes that were started for a run and are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has just ended
            if f"--output_dir={run}\0".encode() in words + b"\0":
                found.append(int(entry.name))
    return found


def marked(mark: str) -> list[int]:
    """Processes whose environment has a mark: those of a run, whatever they are."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended, or is somebody else's
                continue
    return found


def wait_for_all(process: subprocess.Popen[str], mark: str, most_seconds: float) -> str:
    """What a command prints by its end, and by that of all that it has started.

    Args:
        process: with the mark in its environment.
        mark: see `marked`.
        most_seconds: until it has to have ended.

    Raises:
        Wrong: it does not end, or something that it has started does not end with it.
    """
    begun = time.monotonic()
    ended = None
    while True:
        try:
            output, _ = process.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:  # also while a process that it has started holds its output
            now = time.monotonic()
            ended = now if ended is None and process.poll() is not None else ended
            if now - begun > most_seconds or (ended is not None and now - ended > ORPHAN_SECONDS):
                what = "lost: no end" if ended is None else "orphan: processes outlive it"
                left = marked(mark)
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise Wrong(f"{what}: {left}\n{process.communicate()[0]}") from None
    deadline = time.monotonic() + ORPHAN_SECONDS
    while left := marked(mark):
        if time.monotonic() > deadline:
            raise Wrong(f"orphan: processes outlive it: {left}\n{output}")
        time.sleep(0.05)
    return output


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]) if len(sys.argv) > 1 else 20) else 0)
