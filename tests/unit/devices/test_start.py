"""The first import of Paddle."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT

ENDED_WHILE_IMPORTED = """
import os, signal, sys

class Late:  # Paddle has installed its handlers by then
    def find_spec(self, name, *rest):
        if name == "paddle.vision":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Late())
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.start import start_paddle
start_paddle(CpuBackend(), 1)
print("not ended")
"""


def test_a_process_that_is_ended_while_it_imports_paddle_prints_no_crash() -> None:
    words = [sys.executable, "-c", ENDED_WHILE_IMPORTED]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (found.returncode, found.stdout, found.stderr) == (-15, "", "")
