"""Runs on the simulated accelerator (`tests.device`)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from llmsuite.devices.cpu import CpuBackend
from tests.device import library_directory
from tests.multi.conftest import Runner
from tests.parity.cases import Case
from tests.support.paths import ROOT


def of(case: Case, name: str, precision: str = "fp32", *words: str) -> Case:
    """A case on the device."""
    words = (*case.words, "--device=sim", f"--engine.precision={precision}", *words)
    return dataclasses.replace(case, name=name, words=list(words))


def run_on_sim(runner: Runner, cases: Iterable[Case]) -> dict[str, str]:
    """Run cases into directories of their names, those of as many ranks in the same processes.

    Returns:
        Name and what was printed of each case that has not come to its end: after the first of them, all of as many
        ranks.
    """
    failed: dict[str, str] = {}
    for num_ranks, same in itertools.groupby(sorted(cases, key=lambda c: c.num_ranks), key=lambda c: c.num_ranks):
        wanted = list(same)
        path = runner.directory / f"sim-{num_ranks}.json"
        path.write_text(json.dumps([dataclasses.asdict(case) for case in wanted]))
        _, printed = launch(runner, num_ranks, str(path))
        left = [case.name for case in wanted if not (runner.directory / case.name / "done").exists()]
        failed |= dict.fromkeys(left, printed[-5000:])
    return failed


def launch(runner: Runner, num_ranks: int, *words: str, **environment: Any) -> tuple[int, str]:
    """Run `tests.device.launched`: exit code, and what was printed."""
    logs = str(runner.directory / "sim-logs")
    return run_with_sim(runner, "tests.device.launched", str(num_ranks), logs, *words, **environment)


def run_with_sim(runner: Runner, module: str, *words: str, **environment: Any) -> tuple[int, str]:
    """Run a module in a process that has the plug-in of the device: exit code, and what was printed."""
    # a process of tests has the variables of the CPU, which a launcher takes for the user's
    of_cpu = CpuBackend().environment(1)
    inherited = {name: value for name, value in runner.environment.items() if name not in of_cpu}
    process = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**inherited, "CUSTOM_DEVICE_ROOT": str(library_directory()), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout
