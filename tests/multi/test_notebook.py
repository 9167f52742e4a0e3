"""`llmsuite.train` in a program that llmsuite does not own, such as a notebook: interrupts are as of a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.conftest import PluginSite
from tests.multi.conftest import Runner
from tests.support.paths import ROOT
from tests.tools.faults import MARK, marked

PROGRAM = """
import json, os, sys, time
import llmsuite

recipe, overrides = sys.argv[1], json.loads(sys.argv[2])
try:
    llmsuite.train(recipe, overrides, smoke=True)
except KeyboardInterrupt:
    pass
try:  # the notebook goes on, and its own handler is back
    print("KeyboardInterrupt", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("once more", flush=True)
"""

HOLDS = """
import time
import llmsuite

@llmsuite.hookimpl
def llmsuite_step_end(run, step, metrics):
    if step == 2:
        time.sleep(600)
"""


def test_a_second_interrupt_ends_the_ranks(runner: Runner) -> None:
    """While a step does not end, so that the first interrupt stops nothing."""
    site = runner.directory / "site of a notebook"
    site.mkdir()
    PluginSite(site).install("holds", HOLDS)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    name = "notebook"
    overrides = {
        "output_dir": str(runner.directory / name),
        "train.max_steps": 100_000,
        "launch.num_devices": 2,
        "parallel": {},
        "data.eval": None,
    }
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, str(ROOT / "recipes/llama/sft.json"), json.dumps(overrides)],
        cwd=ROOT,
        env={**runner.environment, "LLMSUITE_PLUGINS": "holds", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    runner.wait_for_step(name, 2, process)
    printed = ""
    for text in ("stopping after this step", "KeyboardInterrupt"):
        process.send_signal(signal.SIGINT)
        while text not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
    assert "Traceback" not in printed
    events = Path(overrides["output_dir"]) / "events.jsonl"  # type: ignore[arg-type]
    assert json.loads(events.read_text().splitlines()[-1])["event"] == "stopped"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert rest.endswith("once more\n"), rest
    assert process.returncode == 0


def test_a_run_is_stopped_when_the_kernel_is_killed(runner: Runner) -> None:
    name = "killed-kernel"
    mark = uuid.uuid4().hex
    overrides = {
        "output_dir": str(runner.directory / name),
        "train.max_steps": 100_000,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 2,
        "launch.num_devices": 2,
        "parallel": {},
        "data.eval": None,
    }
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, str(ROOT / "recipes/llama/sft.json"), json.dumps(overrides)],
        cwd=ROOT,
        env={**runner.environment, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    runner.wait_for_step(name, 2, process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    events = (runner.directory / name / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["event"] == "stopped"
    assert (runner.directory / name / "checkpoints" / "latest").exists()
