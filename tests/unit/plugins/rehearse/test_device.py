"""The virtual device in Paddle's runtime: `tests.device.virtual_checks`, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.plugins.rehearse.backend import VirtualBackend
from tests.device.virtual_checks import CHECKS
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What is wrong, by check."""
    file: Path = tmp_path_factory.mktemp("checks") / "found.json"
    command = [sys.executable, "-m", "tests.device.virtual_checks", str(file)]
    environment = {**os.environ, **VirtualBackend().variables(1, 0)}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    read: dict[str, str | None] = json.loads(file.read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("check", CHECKS)
def test_it_counts_what_a_gpu_would_do(found: dict[str, str | None], check: str) -> None:
    assert found[check] is None, found[check]


def test_it_takes_the_kernels_of_a_gpu() -> None:
    assert VirtualBackend().kernels("bf16")["attention"] == "flash_attention"
    assert "attention" not in VirtualBackend().kernels("fp32")
