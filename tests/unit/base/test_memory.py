"""The peak of memory of a process."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from llmsuite.base.memory import peak_memory_bytes


@pytest.mark.parametrize(("system", "unit"), [("freebsd", 1024), ("darwin", 1)])
def test_peak_is_in_bytes(system: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrusage", lambda who: types.SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setattr(sys, "platform", system)
    assert peak_memory_bytes() == 5000 * unit


HELD = 300 << 20
PRINTS_ITS_PEAK = "from llmsuite.base.memory import peak_memory_bytes; print(peak_memory_bytes())"
STARTS_ANOTHER = f"""
import os, sys
held = bytearray({HELD})
held[::4096] = bytes(len(held[::4096]))
os.execv(sys.executable, [sys.executable, "-c", {PRINTS_ITS_PEAK!r}])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say it")
def test_peak_is_not_that_of_the_program_before() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS_ANOTHER], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(done.stdout) < HELD


@pytest.mark.skipif(sys.platform != "linux", reason="says how Linux counts")
def test_peak_includes_what_was_freed() -> None:
    script = f"held = bytearray({HELD})\nheld[::4096] = bytes(len(held[::4096]))\ndel held\n{PRINTS_ITS_PEAK}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) > HELD
