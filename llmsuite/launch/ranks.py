"""The processes of a run on one machine: each a command, or a fork of the process that starts them.

Where the device allows it, ranks are forks: Paddle is imported once for all of them, and its memory is shared.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import BinaryIO, Protocol

from llmsuite.base.supervisor import die_with_parent
from llmsuite.launch.interrupts import own_process
from llmsuite.launch.output import write_to

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the launcher forwards to its ranks; see `stop_signals`."""
GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.1
Work = Sequence[str] | Callable[[], int]
"""A command line; or a function that is called in a fork and returns its exit code."""


class Rank(Protocol):
    """A process that was started."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""

    def kill(self) -> None:
        """Send it SIGKILL."""

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that stop a run: Ctrl-C, SIGTERM, and the end of the terminal, unless that is ignored, as by nohup."""
    return tuple(number for number in FORWARDED if number != signal.SIGHUP or _heeds_hang_up())


def is_repeated(numbers: Iterable[int]) -> bool:
    """True where these signals, in their order, request an immediate stop: any second one but SIGHUP, which a terminal
    that closes sends twice (itself and through its shell)."""
    _, *others = [*numbers] or [0]
    return any(number != signal.SIGHUP for number in others)


def _heeds_hang_up() -> bool:
    return signal.getsignal(signal.SIGHUP) != signal.SIG_IGN


def can_fork() -> bool:
    """True where ranks may be forks of this process: it must have one thread, since a fork has only the one that
    forks."""
    return sys.platform == "linux" and threading.active_count() == 1


def start_rank(work: Work, variables: Mapping[str, str], log: BinaryIO, close: Callable[[], None]) -> Rank:
    """Start a process in a session of its own: Ctrl-C in the terminal reaches it once, from the launcher.

    Args:
        work: of the rank.
        variables: its environment.
        log: receives its output.
        close: closes files of the launcher; called in a fork.
    """
    if callable(work):
        return _Fork(work, variables, log, close)
    return subprocess.Popen(
        work, env=variables, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent
    )


class _Fork:
    """A rank that is a fork of this process."""

    def __init__(
        self, work: Callable[[], int], variables: Mapping[str, str], log: BinaryIO, close: Callable[[], None]
    ) -> None:
        def run() -> None:
            os.setsid()
            die_with_parent()
            own_process()
            # until a run has its own handlers: a KeyboardInterrupt inside Paddle's C++ would become another exception
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if _heeds_hang_up():
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            close()
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            write_to(1, 2)
            os.environ.update(variables)
            sys.exit(work())

        self._process = multiprocessing.get_context("fork").Process(target=run)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until it has handlers of its own
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code


def stop(ranks: Sequence[Rank]) -> None:
    """Kill the remaining ranks: they wait for one that has ended, so they would never end."""
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait(GRACE_SECONDS)


def wait(ranks: Sequence[Rank], seconds: float) -> None:
    """Wait for the end of ranks, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)
