"""Starts the ranks of a run on this machine and watches them: the first that fails is named, the others are stopped.

A rank is a command, or, where the device allows it, a fork of this process: eight ranks then import Paddle once, and
share the memory of what they have imported.

The ranks find each other by the environment variables of `paddle.distributed.launch`, so a rank can as well be
started by that launcher. It is not used here: it writes the whole environment, secrets included, into the log
directory, and notices a dead rank only every five seconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Protocol

from llmsuite.engine.machines import End, Machines
from llmsuite.errors import UserError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
_TAIL_LINES = 40
INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def is_worker() -> bool:
    """Whether this process is one of several ranks somebody has started."""
    return "PADDLE_TRAINER_ID" in os.environ


class Rank(Protocol):
    """A process that was started."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send it one, if it still runs."""

    def kill(self) -> None:
        """Send it SIGKILL."""

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""


def can_fork() -> bool:
    """Whether forks of this process may be ranks: they have only the thread that forks."""
    return sys.platform == "linux" and threading.active_count() == 1


def launch(
    work: Sequence[str] | Callable[[], int],
    num_ranks: int,
    log_dir: Path,
    environment: Callable[[int], Mapping[str, str]],
    write: Callable[[str], None],
    machines: Machines | None = None,
) -> int:
    """Run some work once per rank and wait.

    Args:
        work: the command line of each rank; or a function, which forks of this process call and end with what it
            returns.
        num_ranks: processes to start on this machine.
        log_dir: gets `workerlog.N`, what rank N prints.
        environment: variables of a rank, by its number on this machine; what the user has set wins.
        write: receives what this machine's first rank prints, as it comes, and the end of the log of a rank that fails.
        machines: all of the run; None for this one alone.

    Returns:
        0 when every rank ended well, else the exit code of the first that failed.

    Raises:
        UserError: the machines do not find each other.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    machines = machines or Machines()
    store, *endpoints = machines.meet(_free_ports, num_ranks)
    first = machines.index * num_ranks
    ranks: list[Rank] = []
    interrupted: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        interrupted.append(number)
        for process in ranks:
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        for local in range(num_ranks):
            rank = first + local
            variables = {
                **environment(local),
                **os.environ,
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(machines.count * num_ranks),
                "PADDLE_LOCAL_RANK": str(local),
                "PADDLE_MASTER": store,
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PYTHONUNBUFFERED": "1",
            }
            with open(log_dir / f"workerlog.{rank}", "wb") as log:
                if callable(work):
                    ranks.append(_Fork(work, variables, log, machines))
                else:
                    # a session of their own: Ctrl-C in the terminal reaches them once, from here
                    ranks.append(
                        subprocess.Popen(
                            work, env=variables, stdout=log, stderr=log, start_new_session=True,
                            preexec_fn=_die_with_parent,
                        )
                    )  # fmt: skip
        end = _watch(ranks, first, log_dir, interrupted, write, machines)
        machines.tell(end)
        return end.code
    finally:
        _stop(ranks)
        machines.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Fork:
    """A rank that is a fork of this process."""

    def __init__(
        self, work: Callable[[], int], variables: Mapping[str, str], log: BinaryIO, machines: Machines
    ) -> None:
        def run() -> None:
            os.setsid()  # Ctrl-C in the terminal reaches it once, from the launcher
            _die_with_parent()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            machines.close()  # the connections are the launcher's
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            sys.stdout, sys.stderr = (open(stream, "w", 1, "utf-8", "replace", closefd=False) for stream in (1, 2))  # noqa: SIM115
            os.environ.update(variables)
            sys.exit(work())

        self._process = multiprocessing.get_context("fork").Process(target=run)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until it has handlers of its own
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


def _watch(
    ranks: Sequence[Rank],
    first: int,
    log_dir: Path,
    interrupted: Sequence[int],
    write: Callable[[str], None],
    machines: Machines,
) -> End:
    with open(log_dir / f"workerlog.{first}", encoding="utf-8", errors="replace") as first_log:
        while True:
            codes = [process.poll() for process in ranks]
            elsewhere = machines.poll()
            write(first_log.read())
            # a rank that was killed comes first: the others fail because it is gone
            failed = sorted((local for local, code in enumerate(codes) if code), key=lambda i: (codes[i] or 0) > 0)
            code = (codes[failed[0]] or 0) if failed else 0
            if INTERRUPTED in (code, elsewhere.code if elsewhere else 0) or (code and -code in interrupted):
                _wait(ranks, _GRACE_SECONDS)  # the others are ending too; the first rank has the last words
                write(first_log.read())
                return End(INTERRUPTED, "was interrupted")
            if code > 0 and elsewhere is None:
                elsewhere = _hear(machines)
            if elsewhere is not None and (elsewhere.killed or not code):
                write(f"{elsewhere.why}\n")
                return End(elsewhere.code, elsewhere.why)
            if code:
                write(first_log.read())
                return _explain(first, failed[0], code, log_dir, write, machines)
            if all(code == 0 for code in codes):
                return _wait_for_others(machines, write)
            time.sleep(_POLL_SECONDS)


def _hear(machines: Machines) -> End | None:
    """Give other machines a moment to say that a rank of theirs was killed."""
    deadline = time.monotonic() + (_GRACE_SECONDS if machines.count > 1 else 0)
    while time.monotonic() < deadline:
        if (elsewhere := machines.poll()) is not None:
            return elsewhere
        time.sleep(_POLL_SECONDS)
    return None


def _wait_for_others(machines: Machines, write: Callable[[str], None]) -> End:
    """All ranks of this machine have ended well."""
    while not machines.all_ended:
        time.sleep(_POLL_SECONDS)
        if (elsewhere := machines.poll()) is not None:
            write(f"{elsewhere.why}\n")
            return elsewhere
    return End(0, "")


def _explain(first: int, local: int, code: int, log_dir: Path, write: Callable[[str], None], machines: Machines) -> End:
    """Say which rank failed and why."""
    rank = first + local
    log = log_dir / f"workerlog.{rank}"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if local != 0:  # what the first one said is on the terminal already
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        write("\n".join(lines) + "\n")
    where = f" on machine {machines.index}" if machines.count > 1 else ""
    why = f"rank {rank}{where} {how}; its log: {log}"
    write(f"{why}\n")
    return End(code if code > 0 else 1, why, killed=code < 0)


def _stop(ranks: Sequence[Rank]) -> None:
    """End the ranks that are left: they wait for one that is gone, so they are not asked twice."""
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait(_GRACE_SECONDS)


def _wait(ranks: Sequence[Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)


def _die_with_parent() -> None:
    """In a rank that is about to start: ask Linux to kill it when the launcher dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(address: str, count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind((address, 0))
        return [s.getsockname()[1] for s in sockets]
    except OSError as error:
        raise UserError(f"no {count} free ports on {address}: {error}") from error
    finally:
        for s in sockets:
            s.close()
