"""Checks of a device in processes that they may end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.commands import Finished
from llmsuite.cli import doctor_checks
from llmsuite.cli.doctor_checks import CHECKS_FILE, device_findings
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.device_checks import CHECKS

Patch = pytest.MonkeyPatch


def runs(monkeypatch: Patch, *ends: tuple[int, list[list[Any]]]) -> None:
    """Let processes end with these codes, after they have written these lines."""
    left: Iterator[tuple[int, list[list[Any]]]] = iter(ends)

    def run(command: list[str], environment: dict[str, str], seconds: float) -> Finished:
        code, lines = next(left)
        with Path(environment[CHECKS_FILE]).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return Finished(code, "", "a stack\nno such device")

    monkeypatch.setattr(doctor_checks, "run_command", run)


NAMES = [check.name for check in CHECKS]


def test_each_check_is_reported(monkeypatch: Patch) -> None:
    lines: list[list[Any]] = [[name, None] for name in NAMES]
    lines[1] = [NAMES[1], "it is lost"]
    lines[-1] = [NAMES[-1], "no kernel"]
    runs(monkeypatch, (0, lines))
    found = list(device_findings(CpuBackend()))
    assert [name for _, name, _ in found] == NAMES
    assert [level for level, _, _ in found].count("ok") == len(NAMES) - 2
    assert found[1] == ("BAD", NAMES[1], f"it is lost; so {CHECKS[1].breaks}")
    assert found[-1][0] == "warn", "it costs time only"


def test_a_check_that_ends_the_process_is_named_and_the_others_go_on(monkeypatch: Patch) -> None:
    first = [[NAMES[0]], [NAMES[0], None], [NAMES[1]]]
    runs(monkeypatch, (-11, first), (0, [[name, None] for name in NAMES[2:]]))
    found = list(device_findings(CpuBackend()))
    assert [name for _, name, _ in found] == NAMES
    assert found[1] == ("BAD", NAMES[1], f"the process is ended by SIGSEGV; so {CHECKS[1].breaks}")


def test_checks_that_do_not_begin_are_one_finding(monkeypatch: Patch) -> None:
    runs(monkeypatch, (1, []))
    message = "cannot be run on cpu: the process ends with exit code 1: no such device"
    assert list(device_findings(CpuBackend())) == [("BAD", "checks", message)]
