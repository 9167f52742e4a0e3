"""Commands as forks of one process that has imported Paddle: each starts at once, and in a state of its own.

What Python or Paddle read from the environment while they are imported is that of the whole session. A test of such a
variable, of signals or of what a command imports itself starts a process instead.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.paths import ROOT

_PR_SET_PDEATHSIG = 1


class Warm:
    """The process whose forks run commands; it ends with this one."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.tools.warm"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self._process.kill)

    def run(
        self, module: str, words: list[str], environment: Mapping[str, str], timeout: float = 300
    ) -> tuple[int, str]:
        """Run `main()` of a module as if it had been started with some words: exit code, and what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile() as output:
            request = {"module": module, "words": words, "environment": dict(environment), "output": output.name}
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answered, _, _ = select.select([self._process.stdout], [], [], timeout)
            answer = self._process.stdout.readline() if answered else b""
            printed = Path(output.name).read_text(encoding="utf-8", errors="replace")
        if not answer:
            self._process.kill()  # its forks of ranks end with it
            warm.cache_clear()
            raise AssertionError(f"no end of {module} {' '.join(words)}\n{printed}")
        return int(answer), printed


@functools.cache
def warm() -> Warm:
    """The one of this process."""
    return Warm()


def _import_ahead() -> None:
    """What commands import, but for what starts threads, which no fork has."""
    from llmsuite import builtin
    from llmsuite.cli import commands
    from llmsuite.devices.cpu import CpuBackend
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.ranks import can_fork
    from llmsuite.plugins.manager import load_plugins

    backend = CpuBackend()
    backend.prepare_ranks()
    start_paddle(backend, 1, fork=True)
    os.environ["LLMSUITE_PLUGINS"] = ""
    registry = load_plugins(builtin, commands)
    for stage in registry.stages.values():
        stage.factory()
    for family in registry.models.values():
        family.factory()
    for module in ("tokenizers", "llmsuite.train.trainer", "llmsuite.inference.generate", "tests.parity.worker"):
        importlib.import_module(module)
    assert can_fork(), "a thread is running"


def _become(request: dict[str, str], words: list[str], environment: dict[str, str]) -> None:
    """Turn this fork into a process that was started for the command, and that ends when its parent does."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for source, stream in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*(place for place in places if place not in sys.path), *sys.path]
    importlib.invalidate_caches()
    sys.argv = [request["module"], *words]
    from llmsuite.devices.cpu.gloo.shims import load_kernels

    load_kernels()  # a run of one rank does not, for without a fork it has no front that needs them either


def serve() -> int:
    """Read a command a line, run it in a fork, and answer with its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    _import_ahead()
    for line in sys.stdin:
        request = json.loads(line)
        words, environment = request.pop("words"), request.pop("environment")
        pid = os.fork()
        if pid == 0:
            _become(request, words, environment)
            return int(importlib.import_module(request["module"]).main())
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(serve())
