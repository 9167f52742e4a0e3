"""Ranks that do not do what the others wait for are named, with the call and the place; the run ends by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.launch.hang import STALLED
from tests.conftest import PluginSite
from tests.multi.conftest import Runner
from tests.multi.faulty_rank import FAULTS
from tests.support.paths import ROOT

STALL_SECONDS = "10"
SLEEPER = """
import time
import llmsuite

@llmsuite.hookimpl
def llmsuite_step_end(run, step):
    if step == 3:
        time.sleep(3600)
"""


@pytest.fixture(scope="module")
def ended(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of each faulty launch, and of a run whose rank 0 sleeps; all of them at once."""
    site = tmp_path_factory.mktemp("site")
    PluginSite(site).install("sleeper", SLEEPER)
    words = ("--launch.num_devices=2", "--parallel={}", "--train.max_steps=6", "--data.eval=null")
    processes = {
        "run": runner.start(
            *runner.smoke("run", *words, f"--launch.stall_seconds={STALL_SECONDS}"),
            PYTHONPATH=f"{site}:{ROOT}",
            LLMSUITE_PLUGINS="sleeper",
        )
    }
    for fault in FAULTS:
        command = [sys.executable, "-m", "tests.multi.faulty_rank", fault, str(runner.directory / fault), STALL_SECONDS]
        environment = {**runner.environment, "PYTHONPATH": str(ROOT)}
        processes[fault] = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    outputs = {name: process.communicate(timeout=300)[0] for name, process in processes.items()}
    return {name: (process.returncode, outputs[name]) for name, process in processes.items()}


Ended = dict[str, tuple[int, str]]


def test_ranks_without_a_fault_end_well(ended: Ended) -> None:
    code, output = ended["none"]
    assert code == 0, output


def test_a_rank_that_leaves_a_call_out(ended: Ended) -> None:
    code, output = ended["skips"]
    assert code != 0
    assert "rank 0 makes all_reduce [8] float32 (call 5 of ranks 0, 1; step 3, faulty_rank.py" in output
    assert "rank 1 makes all_reduce [3] float32 (call 5 of ranks 0, 1; step 3, faulty_rank.py" in output


def test_calls_in_another_order_are_named(ended: Ended) -> None:
    code, output = ended["swaps"]
    assert code != 0
    assert "rank 0 makes all_reduce [8] float32 (call 5 of ranks 0, 1; step 3" in output
    assert "rank 1 makes all_reduce [3] float32 (call 5 of ranks 0, 1; step 3" in output
    assert "add_short" in output


def test_another_order_over_two_groups(ended: Ended) -> None:
    code, output = ended["swaps groups"]
    assert code == STALLED
    assert "ranks wait for each other; one has skipped a call, or makes its calls in another order" in output
    assert "rank 0 has not reached the call that rank 1 waits in" in output
    assert "rank 1 has not reached the call that rank 0 waits in" in output
    assert "in add_everywhere" in output  # of the stack


def test_a_call_of_another_shape_is_named(ended: Ended) -> None:
    code, output = ended["shape"]
    assert code != 0
    assert "rank 0 makes all_reduce [8] float32 (call 5 of ranks 0, 1; step 3" in output
    assert "rank 1 makes all_reduce [9] float32 (call 5 of ranks 0, 1; step 3" in output


def test_an_exception_on_one_rank(ended: Ended) -> None:
    code, output = ended["raises"]
    assert code == 1
    assert "the disk of rank 0 is full" in output
    assert "rank 0 ended with exit code 1" in output


def test_a_sleeping_rank(ended: Ended, runner: Runner) -> None:
    code, output = ended["sleeps"]
    assert code == STALLED
    assert f"nothing has happened for {STALL_SECONDS} s" in output
    assert "rank 1 has not reached all_reduce [8] float32 (call 5 of ranks 0, 1; step 3" in output
    assert "in oversleep" in output  # of its stack
    assert "in oversleep" in (runner.directory / "sleeps" / "workerlog.1").read_text()
    assert (runner.directory / "sleeps" / "calls.0.jsonl").read_text().count("\n") == 7


def test_a_rank_that_leaves_as_if_all_was_done(ended: Ended) -> None:
    code, output = ended["leaves"]
    assert code not in (0, STALLED), output
    assert "rank 1 has left with exit code 0 before all_reduce [8] float32 (call 5 of ranks 0, 1; step 3" in output


def test_ranks_wait_as_long_as_the_launcher_says(ended: Ended) -> None:
    """2 s here; without being told Gloo would wait for 30 s, and the watchdog names the rank that sleeps in 10."""
    code, output = ended["impatient"]
    assert code == 1, output
    assert "TIMEOUT self_rank" in output


def test_a_run_whose_first_rank_sleeps(ended: Ended, runner: Runner) -> None:
    code, output = ended["run"]
    assert code == STALLED, output
    assert "rank 0 has not reached" in output
    assert "in which rank 1 waits" in output
    assert "in llmsuite_step_end" in output
    assert Path(runner.directory, "run", "logs", "calls.1.jsonl").exists()
