"""Launches eight processes again and again: every launch has to end well and leave nobody behind.

python -m tests.tools.faults [LAUNCHES]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from tests.multi.conftest import Runner

STEPS = 2
PARALLEL = '{"tensor_parallel_degree":2,"pipeline_parallel_degree":2,"sequence_parallel":true,"sharding":"stage2"}'


def main(launches: int) -> int:
    """Report each launch; returns how many did not end well."""
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(Path(directory))
        for number in range(1, launches + 1):
            name, start = f"launch-{number}", time.monotonic()
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


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]) if len(sys.argv) > 1 else 20) else 0)
