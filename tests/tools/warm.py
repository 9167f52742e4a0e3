"""Commands as forks of one process that has imported Paddle: each starts at once, and in a state of its own.

What Python or Paddle read from the environment while they are imported is that of the whole session. A test of such a
variable, of signals or of what a command imports itself starts a process instead.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

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
            pid = self._fork(module, words, environment, output.name)
            code = self.ask({"wait": pid}, timeout)
            printed = Path(output.name).read_text(encoding="utf-8", errors="replace")
        if code is None:
            self._process.kill()  # its forks of ranks end with it
            warm.cache_clear()
            raise AssertionError(f"no end of {module} {' '.join(words)}\n{printed}")
        return code, printed

    def start(self, module: str, words: list[str], environment: Mapping[str, str]) -> Started:
        """Start `main()` of a module likewise, and return at once."""
        with tempfile.NamedTemporaryFile(delete=False) as output:
            return Started(self, self._fork(module, words, environment, output.name), Path(output.name))

    def _fork(self, module: str, words: list[str], environment: Mapping[str, str], output: str) -> int:
        pid = self.ask({"module": module, "words": words, "environment": dict(environment), "output": output})
        assert pid is not None, "the process that runs commands has ended, or is not there yet"
        return pid

    def ask(self, request: Mapping[str, Any], timeout: float = 600) -> int | None:
        """The process's answer to a request; None when there is none, or none in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answered, _, _ = select.select([self._process.stdout], [], [], timeout)
        answer = json.loads(self._process.stdout.readline() or b"null") if answered else None
        return None if answer is None else int(answer)


class Started:
    """A fork that runs a command, with the methods of `subprocess.Popen[str]` that tests call."""

    returncode: int | None = None

    def __init__(self, parent: Warm, pid: int, output: Path):
        self.pid = pid
        self._parent = parent
        self._output = output

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._parent.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        """What it has printed by its end. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self._output.read_text(encoding="utf-8", errors="replace"), None

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:  # it stays a child of the parent until that is asked again
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def warm() -> Warm:
    """The one of this process."""
    return Warm()


def _import_ahead() -> None:
    """What commands import, but for what starts threads, which no fork has."""
    from llmsuite.contract.registry import load_plugins
    from llmsuite.devices.cpu import CpuBackend
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.ranks import can_fork

    os.environ["LLMSUITE_PLUGINS"] = ""
    registry = load_plugins()
    backend = CpuBackend()
    backend.prepare_ranks()
    start_paddle(backend, 1, fork=True)
    for stage in registry.stages.values():
        stage.factory()
    for family in registry.models.values():
        family.factory()
    for module in ("tokenizers", "llmsuite.engine.trainer", "llmsuite.inference.generate", "tests.parity.worker"):
        importlib.import_module(module)
    assert can_fork(), "a thread is running"


def _become(request: dict[str, str], words: list[str], environment: dict[str, str]) -> None:
    """Turn this fork into a process that was started for the command, and that ends when its parent does."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for source, stream in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*(place for place in places if place not in sys.path), *sys.path]
    importlib.invalidate_caches()
    sys.argv = [request["module"], *words]
    from llmsuite.devices.cpu.gloo.shims import load_kernels

    load_kernels()  # a run of one rank does not, for without a fork it has no front that needs them either


def serve() -> int:
    """Answer requests, one a line: a command with the pid of the fork that runs it, a pid with its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    _import_ahead()
    gc.collect()
    gc.freeze()  # forks do not walk through all that was imported, nor copy the memory it lies in
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer: int | None = os.waitstatus_to_exitcode(status)
        elif "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            words = request.pop("words")
            environment = request.pop("environment")
            answer = os.fork()
            if answer == 0:
                _become(request, words, environment)
                return int(importlib.import_module(request["module"]).main())
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(serve())
