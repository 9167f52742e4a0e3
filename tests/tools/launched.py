"""Runs a module of tests in every rank of a launch; they are forks, so Paddle is imported once.

    python -m tests.tools.launched RANKS LOGS MODULE [WORD...]

Each rank calls `main(*words)` of the module and ends with what it returns. `before_paddle(*words)`, if there is one, is
called before Paddle's first import.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from llmsuite.contract.registry import load_plugins
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.start import start_paddle
from llmsuite.launch.launch import launch
from llmsuite.launch.ranks import can_fork


def main() -> int:
    """Start the ranks that the command line asks for; ends as they do."""
    num_ranks = int(sys.argv[1])
    logs = Path(sys.argv[2])
    name = sys.argv[3]
    words = sys.argv[4:]
    load_plugins()  # for the kernels of the CPU
    backend = CpuBackend()
    module = importlib.import_module(name)
    if hasattr(module, "before_paddle"):
        module.before_paddle(*words)
    if num_ranks > 1:
        backend.prepare_ranks()
    start_paddle(backend, num_ranks, fork=num_ranks > 1)
    assert can_fork(), "a thread is running"

    def work() -> int:
        if num_ranks > 1:
            backend.after_paddle()
        return int(module.main(*words))

    return launch(
        work, num_ranks, logs, lambda local: backend.variables(num_ranks, local), lambda text: print(text, end="")
    )


if __name__ == "__main__":
    sys.exit(main())
