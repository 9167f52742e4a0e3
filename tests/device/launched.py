"""Runs a module of tests on the device `sim`, in ranks that each import Paddle with its plug-in.

    python -m tests.device.launched RANKS LOGS FILE [MODULE]

Each rank calls `main(FILE)` of the module: `tests.parity.worker`, which runs cases of `tests.parity.cases`, if none is
named. A module may have `ENVIRONMENT`, variables of its ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from llmsuite.contract.registry import load_plugins
from llmsuite.devices.start import start_paddle
from llmsuite.launch.launch import launch
from tests.device import SimBackend

WORKER = "tests.parity.worker"
IS_RANK = "--rank"


def start(num_ranks: int, logs: Path, file: str, module: str = WORKER) -> int:
    """Start the ranks; returns the exit code of the first that fails."""
    backend = SimBackend()
    command = [sys.executable, "-m", "tests.device.launched", IS_RANK, file, module]
    return launch(
        command, num_ranks, logs, lambda local: backend.variables(num_ranks, local), lambda text: print(text, end="")
    )


def rank(file: str, module: str) -> int:
    """What each rank does."""
    imported = importlib.import_module(module)
    os.environ.update(getattr(imported, "ENVIRONMENT", {}))
    load_plugins()
    start_paddle(SimBackend(), 1, join=True)  # the launcher has set the variables
    return int(imported.main(file))


if __name__ == "__main__":
    if sys.argv[1] == IS_RANK:
        sys.exit(rank(*sys.argv[2:]))
    sys.exit(start(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
