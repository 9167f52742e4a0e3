"""Checks of a device in `llmsuite doctor`, each in a process that it may end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmsuite.base.commands import CommandTimeout, run_command
from llmsuite.base.locks import scratch_directory

if TYPE_CHECKING:
    from llmsuite.devices.base import DeviceBackend
    from llmsuite.devices.device_checks import DeviceCheck

CHECKS_FILE = "LLMSUITE_DOCTOR_CHECKS"
"""Environment variable of a process that runs the checks: the file that they are written to."""
_SECONDS = 600.0


def check_device(backend: DeviceBackend, file: Path) -> int:
    """Run the checks that the file does not have yet, as the process that may end."""
    from llmsuite.devices.start import start_paddle

    start_paddle(backend, 1)
    from llmsuite.devices.device_checks import run_checks

    backend.activate(0)
    run_checks(backend, file)
    return 0


def device_findings(backend: DeviceBackend) -> Iterator[tuple[str, str, str]]:
    """Level, name and text of each check. Imports Paddle."""
    from llmsuite.devices.device_checks import CHECKS, ENDED, read_checks

    command = [sys.executable, "-m", "llmsuite", "doctor", f"--device={backend.name}"]
    by_name = {check.name: check for check in CHECKS}
    num_seen = 0
    with scratch_directory() as directory:
        file = directory / "checks"
        while num_seen < len(CHECKS):
            variables = {**os.environ, **backend.environment(1), CHECKS_FILE: str(file)}
            try:
                done = run_command(command, variables, _SECONDS)
                end = _end(done.code, done.errors)
            except CommandTimeout as error:
                end = f"the process does not end within {_SECONDS:.0f} s: {error}"
            found = read_checks(file)[num_seen:]
            if not found:
                yield "BAD", "checks", f"cannot be run on {backend.name}: {end}"
                return
            for name, wrong in found:
                yield _finding(by_name[name], end if wrong == ENDED else wrong)
            num_seen += len(found)


def _end(code: int, errors: str) -> str:
    """How a process has ended, in one line."""
    if code < 0:
        return f"the process is ended by {signal.Signals(-code).name}"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"the process ends with exit code {code}: {last}"


def _finding(check: DeviceCheck, wrong: str | None) -> tuple[str, str, str]:
    if wrong is None:
        return "ok", check.name, "right"
    return "BAD" if check.is_fatal else "warn", check.name, f"{wrong}; so {check.breaks}"
