"""Runs cases of `tests.parity.cases` on the device `sim`, in ranks that each import Paddle with its plug-in.

    python -m tests.device.launched RANKS LOGS FILE

starts `python -m tests.device.launched FILE` as each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmsuite.contract.registry import load_plugins
from llmsuite.devices.start import start_paddle
from llmsuite.launch.launch import launch
from tests.device import SimBackend


def start(num_ranks: int, logs: Path, file: str) -> int:
    """Start the ranks; returns the exit code of the first that fails."""
    backend = SimBackend()
    command = [sys.executable, "-m", "tests.device.launched", file]
    return launch(
        command, num_ranks, logs, lambda local: backend.variables(num_ranks, local), lambda text: print(text, end="")
    )


def rank(file: str) -> int:
    """What each rank does."""
    from tests.parity.worker import main

    load_plugins()
    start_paddle(SimBackend(), 1, join=True)  # the launcher has set the variables
    return main(file)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(rank(sys.argv[1]))
    sys.exit(start(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
