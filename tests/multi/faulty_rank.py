"""Two ranks that ask the same of each other in every step, until one of them does something else.

    python -m tests.multi.faulty_rank FAULT LOGS SECONDS

starts them under the watchdog, and ends as they do.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.cpu.gloo import GLOO_TIMEOUT
from llmsuite.launch.launch import is_worker, launch

FAULT_STEP = 3
STEPS = 5
FAULTS = ("none", "skips", "swaps", "swaps groups", "shape", "raises", "sleeps", "leaves", "impatient")
"""All but "raises" and "impatient" are those of rank 1."""


def main(fault: str, logs: Path, seconds: float) -> int:
    if is_worker():
        return work(fault)
    backend = CpuBackend()
    backend.prepare_ranks()
    command = [sys.executable, "-m", "tests.multi.faulty_rank", fault, str(logs), str(seconds)]
    # a rank that waits for 2 s only fails before anybody notices the other: so Gloo's limit is the one that was set
    patience = {GLOO_TIMEOUT: "2"} if fault == "impatient" else backend.timeout_variables(seconds)
    environment = {**backend.environment(2), **patience}
    return launch(command, 2, logs, lambda rank: environment, print, stall_seconds=seconds)


def work(fault: str) -> int:
    """A rank."""
    from llmsuite.devices.start import start_paddle

    start_paddle(CpuBackend(), 2, join=True)
    import paddle

    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.launch import calls
    from llmsuite.parallel import collective

    mesh = collective.start(Degrees(1, 2, 1, 1))
    long = paddle.ones([8])
    short = paddle.ones([3])

    def add_long() -> None:
        collective.sum_in_group(long, mesh.data_group)

    def add_short() -> None:
        collective.sum_in_group(short, mesh.data_group)

    def add_everywhere() -> None:
        collective.sum_over_run([1.0, 2.0])

    for step in range(1, STEPS + 1):
        calls.step(step)
        work = [add_long, add_short, add_everywhere]
        if step == FAULT_STEP and collective.rank() == 0 and fault == "raises":
            raise OSError("the disk of rank 0 is full")
        if step == FAULT_STEP and collective.rank() == 1:
            if fault == "skips":
                work = [add_short, add_everywhere]
            elif fault == "swaps":
                work = [add_short, add_long, add_everywhere]
            elif fault == "swaps groups":
                work = [add_everywhere, add_long, add_short]
            elif fault == "shape":
                long = paddle.ones([9])
            elif fault == "leaves":
                os._exit(0)
            elif fault in ("sleeps", "impatient"):
                oversleep()
        for call in work:
            call()
    return 0


def oversleep() -> None:
    time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
