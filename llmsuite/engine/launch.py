"""Starts the ranks of a run on this machine and watches them: the first that fails is named, the others are stopped.

The ranks find each other by the environment variables of `paddle.distributed.launch`, so a rank can as well be
started by that launcher. It is not used here: it writes the whole environment, secrets included, into the log
directory, and notices a dead rank only every five seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from llmsuite.errors import UserError

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
_TAIL_LINES = 40
INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1


def is_worker() -> bool:
    """Whether this process is one of several ranks somebody has started."""
    return "PADDLE_TRAINER_ID" in os.environ


def launch(
    command: Sequence[str],
    num_ranks: int,
    log_dir: Path,
    environment: Callable[[int], Mapping[str, str]],
    write: Callable[[str], None],
) -> int:
    """Run a command once per rank and wait.

    Args:
        command: the command line of each rank.
        num_ranks: processes to start.
        log_dir: gets `workerlog.N`, what rank N prints.
        environment: variables of a rank, by its number; what the user has set wins.
        write: receives what rank 0 prints, as it comes, and the end of the log of a rank that fails.

    Returns:
        0 when every rank ended well, else the exit code of the first that failed.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    endpoints = [f"127.0.0.1:{port}" for port in _free_ports(num_ranks + 1)]
    ranks: list[subprocess.Popen[bytes]] = []
    interrupted: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        interrupted.append(number)
        for process in ranks:
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(num_ranks):
            variables = {
                **environment(rank),
                **os.environ,
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(num_ranks),
                "PADDLE_LOCAL_RANK": str(rank),
                "PADDLE_MASTER": endpoints[0],
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints[1:]),
                "PADDLE_CURRENT_ENDPOINT": endpoints[1 + rank],
                "PYTHONUNBUFFERED": "1",
            }
            with open(log_dir / f"workerlog.{rank}", "wb") as log:
                # a session of their own: Ctrl-C in the terminal reaches them once, from here
                rank_process = subprocess.Popen(
                    command, env=variables, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent
                )
                ranks.append(rank_process)
        return _watch(ranks, log_dir, interrupted, write)
    finally:
        _stop(ranks)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], log_dir: Path, interrupted: Sequence[int], write: Callable[[str], None]
) -> int:
    with open(log_dir / "workerlog.0", encoding="utf-8", errors="replace") as first_log:
        while True:
            codes = [process.poll() for process in ranks]
            write(first_log.read())
            # a rank that was killed comes first: the others fail because it is gone
            failed = sorted((rank for rank, code in enumerate(codes) if code), key=lambda rank: (codes[rank] or 0) > 0)
            if failed:
                rank, code = failed[0], codes[failed[0]] or 0
                write(first_log.read())
                if interrupted and (code == INTERRUPTED or -code in interrupted):
                    _wait(ranks, _GRACE_SECONDS)  # the others are ending too; rank 0 has the last words
                    write(first_log.read())
                    return INTERRUPTED
                return _explain(rank, code, log_dir, write)
            if all(code == 0 for code in codes):
                return 0
            time.sleep(_POLL_SECONDS)


def _explain(rank: int, code: int, log_dir: Path, write: Callable[[str], None]) -> int:
    """Say which rank failed and why; returns the exit code of the run."""
    log = log_dir / f"workerlog.{rank}"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if rank != 0:  # what rank 0 said is on the terminal already
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        write("\n".join(lines) + "\n")
    write(f"rank {rank} {how}; its log: {log}\n")
    return code if code > 0 else 1


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that are left: they wait for one that is gone, so they are not asked twice."""
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait(_GRACE_SECONDS)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)


def _die_with_parent() -> None:
    """In a rank that is about to start: ask Linux to kill it when the launcher dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    except OSError as error:
        raise UserError(f"no {count} free ports on 127.0.0.1: {error}") from error
    finally:
        for s in sockets:
            s.close()
