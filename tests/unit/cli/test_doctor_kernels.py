"""The tables of `llmsuite doctor --kernels`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmsuite.cli import doctor
from llmsuite.cli.doctor_kernels import MESSAGES, _messages
from llmsuite.cli.main import main
from llmsuite.devices import kernel_checks

FEW = tuple(case for case in kernel_checks.CASES if case.name in ("head 64, window", "width 64"))
RIGHT = {"name": "all-reduce", "dtype": "float32", "is_right": True, "seconds": 0.5, "bytes_per_second": 2e9}


def test_the_table_of_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel_checks.check_kernels, "__defaults__", (FEW,))
    assert main(["doctor", "--kernels"]) == 0
    printed = capsys.readouterr().out
    assert "cpu, fp32" in printed
    assert "cpu, bf16" in printed
    assert printed.count("  attention       head 64, window") == 2
    assert "not compared here: " in printed
    assert printed.splitlines()[-1] == "ok    all of cpu"


def test_a_failure_ends_the_command_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_checks.check_kernels, "__defaults__", (FEW,))
    monkeypatch.setattr(kernel_checks, "_FACTOR", {"float32": 0.0, "bfloat16": 0.0})
    lines = [MESSAGES + json.dumps([{**RIGHT, "is_right": False}])]

    def start(*words: Any) -> tuple[int, list[str]]:
        assert words[2:] == ("--kernels",)
        return 0, lines

    monkeypatch.setattr(doctor, "start_ranks", start)
    assert main(["doctor", "--kernels", "--num_devices=2"]) == 2
    printed = capsys.readouterr().out
    assert "BAD   attention (head 64, window, bf16): output off by" in printed
    assert "BAD   all-reduce (float32): a rank has wrong values" in printed
    assert printed.splitlines()[-1].endswith(" failures")


def test_ranks_that_fail_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    (fault,) = _messages(3, ["rank 1: has waited in all_reduce"], is_first=True)
    assert "exit code 3" in fault
    assert "rank 1: has waited" in fault
    assert _messages(0, [MESSAGES + json.dumps([RIGHT])], is_first=True) == []
    assert "all-reduce      float32   right    500.00 ms    2.00 GB/s" in capsys.readouterr().out
