"""Ctrl-C once more, wherever a run is: it ends with exit code 130 as stopped, without a traceback, and goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Runner
from tests.parity.cases import few
from tests.support.interrupted_runs import MESHES, SMALL
from tests.support.paths import ROOT

# In rank 0, from its first step on: at a call, by number, of functions with a name, the run is told to stop, and once
# more when rank 0 knows that.
_PLUGIN = """
import os, re, signal, sys, time
import llmsuite

OURS = re.compile("/(llmsuite|paddle)/")
NAME, left = os.environ["STOP_IN"], int(os.environ["STOP_AT"])

def profile(frame, event, argument):
    global left
    if event == "call" and frame.f_code.co_name == NAME and OURS.search(frame.f_code.co_filename):
        left -= 1
        if left == 0:
            run = os.getppid() if "PADDLE_TRAINER_ID" in os.environ else os.getpid()
            for _ in range(2):
                os.kill(run, signal.SIGINT)
                until = time.monotonic() + 1
                while time.monotonic() < until:  # in Python, where its handlers run
                    pass
            time.sleep(60)
            print("it was not ended", flush=True)

@llmsuite.hookimpl
def llmsuite_run_start(run):
    sys.setprofile(profile)
"""
MOMENTS = {
    1: [("backward", 1), ("forward", 9), ("collate", 2), ("write", 1), ("snapshot_state", 1)],
    2: [("_pass_ended", 1), ("_pass_ended", 30), ("backward", 1), ("backward", 5), ("forward", 9), ("write", 1)],
    4: [("_pass_ended", 2), ("backward", 2)],
}
CASES = few(
    {f"{n} in {name} {at}": (n, name, at) for n, moments in MOMENTS.items() for name, at in moments},
    *("1 in forward 9", "1 in collate 2", "1 in snapshot_state 1", "2 in _pass_ended 1", "2 in backward 1"),
    *("2 in forward 9", "4 in backward 2"),
)


@pytest.mark.parametrize(("ranks", "name", "at"), CASES.values(), ids=CASES)
def test_a_second_signal_ends_a_run_at_once(runner: Runner, ranks: int, name: str, at: int) -> None:
    site = runner.directory / f"site-{ranks}-{name}-{at}"
    site.mkdir()
    PluginSite(site).install("stops", _PLUGIN)
    run = f"twice-{ranks}-{name}-{at}"
    # data ranks have hooks of gradients, which C++ calls without a look at their exceptions
    mesh = [f"--launch.num_devices={ranks}", "--parallel={}"] if name == "_pass_ended" else MESHES[ranks]
    words = runner.smoke(
        run, "--train.max_steps=4", "--checkpoint.save_steps=1", "--engine.recompute=full", *SMALL, *mesh
    )
    where = {"STOP_IN": name, "STOP_AT": str(at), "LLMSUITE_PLUGINS": "stops", "PYTHONPATH": f"{site}:{ROOT}"}
    process = runner.start(*words, **where)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert said.count("once more to stop immediately") == 1, said
    assert not re.search("Traceback|Error|not ended|has failed", said), said
    events = _events(runner.directory / run)
    assert events[0] == "started"
    assert events[-1] == "stopped"
    assert events.count("stopped") == 1
    assert "resuming" in (said := runner.run(*words, "--resume")) or "no checkpoint" in said
    assert _events(runner.directory / run)[-1] == "ended"


def _events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
