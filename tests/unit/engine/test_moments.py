"""The moments at which runs are killed in tests are still those of the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.moments import PLUGIN
from tests.support.paths import ROOT


def test_each_moment_is_found(tmp_path: Path) -> None:
    script = f"{PLUGIN}\nwork = lambda plan, registry, resume: 0\nprint(marked(None, None, False))\n"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "MOMENTS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == "0\n", found.stderr
