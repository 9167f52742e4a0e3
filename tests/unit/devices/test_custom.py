"""`CustomBackend` on a device of Paddle's CustomDevice interface: the simulated one, which is checked here too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.devices import device_checks
from llmsuite.devices.custom import CustomBackend
from tests.device import SimBackend, library_directory
from tests.device.checks import CHECKS
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What each check says."""
    file = tmp_path_factory.mktemp("sim") / "found.json"
    environment = {**os.environ, "CUSTOM_DEVICE_ROOT": str(library_directory())}
    command = [sys.executable, "-m", "tests.device.checks", str(file)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, str | None] = json.loads(file.read_text(encoding="utf-8"))
    return result


@pytest.mark.parametrize("check", CHECKS)
def test_the_simulated_device(found: dict[str, str | None], check: str) -> None:
    assert found[check] is None, found[check]


@pytest.mark.parametrize("check", [check.name for check in device_checks.CHECKS if check.name != "kernels"])
def test_the_doctor_finds_nothing_wrong(found: dict[str, str | None], check: str) -> None:
    assert found[check] is None, found[check]


class Npu(CustomBackend):
    name = "npu"
    install = "pip install paddle-custom-npu"


def test_a_device_without_its_plug_in_is_named() -> None:
    reason = Npu().unavailable(1)
    assert reason is not None
    assert "has no plug-in for device npu; install it with: pip install paddle-custom-npu" in reason


def test_ranks_use_the_library_of_the_device() -> None:
    environment = Npu().environment(2)
    assert environment["PADDLE_DISTRI_BACKEND"] == "xccl"
    assert environment["PADDLE_XCCL_BACKEND"] == "npu"
    assert Npu().rank_environment(3) == {"FLAGS_selected_npus": "3"}


def test_paddle_finds_one_library(tmp_path: Path) -> None:
    """It would load others in the directory too, such as that of an older version."""
    assert [path.name for path in library_directory().iterdir()] == ["libsim.so"]
    assert SimBackend().environment(1)["CUSTOM_DEVICE_ROOT"] == str(library_directory())
