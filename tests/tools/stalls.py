"""Runs one of whose two ranks does something else in its third step: each has to be named, with the call or the place.

python -m tests.tools.stalls [FAULT...]

In both modes of the engine, with tensor parallel, where what Paddle's operators and programs send is not recorded.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import PluginSite
from tests.multi.conftest import Runner
from tests.support.paths import ROOT

FAULTY = """
import os, time
from pathlib import Path
from llmsuite.launch import calls
from llmsuite.parallel import collective, loss_ledger, pipeline

steps = [0]
reduce, hidden_states, step_begins = loss_ledger.LossLedger.reduce, pipeline.PipelineStage.hidden_states, calls.step

def begins(number):
    steps[0] = number
    step_begins(number)

def is_due(rank):
    due = steps[0] == 3 and collective.rank() == rank
    if due:
        Path(os.environ["FAULT_AT"]).write_text(str(time.time()))
    return due

def faulty_reduce(self):
    fault = os.environ["FAULT"]
    if fault == "raises" and is_due(0):
        raise OSError("the disk of rank 0 is full")
    if fault == "skips" and is_due(1):
        return 1.0, {"loss": 1.0, "tokens": 1.0, "supervised_tokens": 1.0, "stop": 0.0, "save": 0.0}
    if fault == "swaps" and is_due(1):
        collective.sum_over_run([1.0])
    if fault == "shape" and is_due(1):
        self.add_requests(one_more=1)
    if fault == "sleeps" and is_due(1):
        oversleep()
    return reduce(self)

def faulty_states(self, *given, **named):
    if os.environ["FAULT"] == "sleeps in a pass" and is_due(1):
        oversleep()
    return hidden_states(self, *given, **named)

def oversleep():
    time.sleep(3600)

loss_ledger.LossLedger.reduce = faulty_reduce
pipeline.PipelineStage.hidden_states = faulty_states
calls.step = begins
"""
DIFFERENCE = ("rank 0 makes all_reduce [", "rank 1 makes all_reduce [", "step 3, ")
FAULTS: dict[str, tuple[str, ...]] = {
    "skips": DIFFERENCE,
    "swaps": DIFFERENCE,
    "shape": DIFFERENCE,
    "raises": ("the disk of rank 0 is full", "rank 0 ended with exit code 1"),
    "sleeps": ("rank 1 has not reached all_reduce [", "in which rank 0 waits", "in oversleep"),
    "sleeps in a pass": ("nothing has happened for 5 s", "in oversleep"),
}
"""What has to be said of each."""
LIMIT_SECONDS = 10.0
"""From the fault to its name."""


def _follow(process: subprocess.Popen[str], texts: Sequence[str]) -> tuple[str, float, float]:
    """What a run prints; when it had said all of some texts, infinite for never; when it had ended. Times are seconds
    since the epoch."""
    output = ""
    said = math.inf
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if said == math.inf and all(text in output for text in texts):
            said = time.time()
    process.wait()
    return output, said, time.time()


def main(faults: list[str]) -> int:
    """Report each run; returns how many were not explained."""
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(Path(directory))
        site = Path(directory) / "site"
        site.mkdir()
        PluginSite(site).install("faulty", FAULTY)
        for fault, mode in itertools.product(faults, ("dynamic", "to_static")):
            name = f"{fault} {mode}".replace(" ", "-")
            moment = Path(directory) / f"{fault} {mode}"
            words = ("--launch.num_devices=2", '--parallel={"tensor_parallel_degree": 2}', f"--engine.mode={mode}")
            more = ("--train.max_steps=5", "--data.eval=null", "--launch.stall_seconds=5")
            process = runner.start(
                *runner.smoke(name, *words, *more),
                PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]),
                LLMSUITE_PLUGINS="faulty",
                FAULT=fault,
                FAULT_AT=str(moment),
            )
            output, named, ended = _follow(process, FAULTS[fault])
            at = float(moment.read_text()) if moment.exists() else float("nan")
            missing = [text for text in FAULTS[fault] if text not in output]
            well = process.returncode not in (0, None) and named - at <= LIMIT_SECONDS
            bad += not well
            verdict = "named" if well else f"exit code {process.returncode}, not said: {missing}\n{output}"
            times = f"{named - at:.1f} s from the fault to its name, {ended - at:.1f} s to the end of the run"
            print(f"{fault}, {mode}: {verdict} ({times})", flush=True)
    print(f"{2 * len(faults) - bad} of {2 * len(faults)} faults were named")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:] or list(FAULTS)) else 0)
