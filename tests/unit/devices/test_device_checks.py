"""Checks of a device: right on the CPU, and what they say of a device that is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import paddle
import pytest

from llmsuite.devices import device_checks
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.device_checks import CHECKS, ENDED, DeviceCheck, found_wrong, read_checks, run_checks
from tests.support.paths import ROOT

OF_MEMORY = """
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.device_checks import CHECKS, found_wrong
print(found_wrong(next(check for check in CHECKS if check.name == "memory"), CpuBackend()))
"""


@pytest.mark.parametrize("check", [c for c in CHECKS if c.name != "memory"], ids=lambda check: check.name)
def test_the_cpu_is_right(check: DeviceCheck) -> None:
    assert found_wrong(check, CpuBackend()) is None


START = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def test_the_peak_of_memory_of_the_cpu_is_right() -> None:
    """In a process of its own: this one may have had far more than it has now.

    It is started by a small one, as the peak of a process begins with the memory of the one that has started it.
    """
    command = [sys.executable, "-c", START, OF_MEMORY]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "None"


def test_names_are_different() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_a_write_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Paddle computes on the host, and copies the result into new memory."""
    views = next(check for check in CHECKS if check.name == "view, add_")
    monkeypatch.setattr(paddle.Tensor, "add_", lambda x, y: x + y)
    found = found_wrong(views, CpuBackend())
    assert found is not None
    assert "x[2:4].add_(1) on zeros gives [0.0, 0.0, 0.0, 0.0, 0.0, 0.0] instead of [0.0, 0.0, 1.0" in found


def test_random_states_that_have_no_effect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    state = next(check for check in CHECKS if check.name == "random state")
    monkeypatch.setattr(paddle, "set_rng_state", lambda state: None)
    assert found_wrong(state, CpuBackend()) == "other numbers come after paddle.set_rng_state"


def test_missing_kernels_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = next(check for check in CHECKS if check.name == "kernels")
    monkeypatch.setattr(
        device_checks,
        "kernel_dtypes",
        lambda name, kind: set() if name == "silu" and kind == "cpu" else {"float32"},
    )
    assert found_wrong(kernels, CpuBackend()) == "no kernel in float32 silu"


def test_a_check_that_ends_the_process_is_not_run_again(tmp_path: Path) -> None:
    ran = list[str]()

    def end(backend: DeviceBackend) -> None:
        raise KeyboardInterrupt  # as a signal does, nothing is written after it

    def note(backend: DeviceBackend) -> None:
        ran.append("note")
        raise ValueError("Traceback\nin a file\nExternalError: no stream (at x.cc:1)")

    checks = [DeviceCheck("ends", "nothing", end), DeviceCheck("notes", "nothing", note)]
    file = tmp_path / "checks"
    with pytest.raises(KeyboardInterrupt):
        run_checks(CpuBackend(), file, checks)
    run_checks(CpuBackend(), file, checks)
    run_checks(CpuBackend(), file, checks)
    assert ran == ["note"]
    assert read_checks(file) == [("ends", ENDED), ("notes", "ValueError: ExternalError: no stream (at x.cc:1)")]
