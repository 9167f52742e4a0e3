"""The import that lets a script of one's own be several CPU processes; tests/multi/test_paddle_scripts.py runs some."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest

NAME = "llmsuite.devices.cpu_ranks"


@pytest.fixture(autouse=True)
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def test_paddle_must_not_be_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", types.ModuleType("paddle"))
    with pytest.raises(ImportError, match=r"import llmsuite.devices.cpu_ranks before paddle"):
        importlib.import_module(NAME)


@pytest.mark.parametrize("package", ["paddlepaddle-gpu", "paddlepaddle-xpu"])
def test_with_a_paddle_for_another_device_nothing_is_done(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", types.ModuleType("paddle"))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [types.SimpleNamespace(name=package)])
    importlib.import_module(NAME)


def test_a_single_process_is_no_rank() -> None:
    """Nothing of Gloo is loaded: it needs no compiler."""
    shims = "llmsuite.devices.cpu.gloo.shims"
    code = f"import {NAME}, sys, paddle; print(paddle.device.get_device(), '{shims}' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["cpu", "False"]
