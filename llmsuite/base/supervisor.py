"""A supervisor process that runs a command and cleans up after it: when the command ends, or the process that started
it ends, all descendants of the command are killed.

User code (a reward, an environment, a server) starts processes of its own: a sandbox, a prover, a browser. Killing the
command alone would leave those running. So a supervisor is its parent, and Linux makes every descendant whose parent
has ended a child of the supervisor (PR_SET_CHILD_SUBREAPER), in whatever session it is.

This file is the program of the supervisor too. It is started without `site` and imports nothing but the standard
library, so that it starts fast and takes little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ENDING_SECONDS = 5.0
"""Time to wait for the supervisor, once it is to end everything."""
_CHUNK = 1 << 16
_MEMORY_POLL_SECONDS = 0.5
"""Between two measurements of the memory of all descendants, where that has a limit."""
_KILL = signal.SIGUSR1
"""Signal to the supervisor that stands for SIGKILL to its command."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, _KILL)
"""Signals to the supervisor that are for its command."""
_EXCEEDED_MEMORY = b"M"
"""Message of the supervisor to the process that started it, before it kills a command that takes too much memory."""


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that has started it dies, even by SIGKILL. Called in the child before
    it does anything else."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class SupervisedProcess:
    """A command that ends with everything it has started: on its own, by `end`, or because the process that made this
    object has ended."""

    def __init__(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int] = (),
        output: IO[bytes] | int | None = None,
        max_output_bytes: int | None = None,
        grace_seconds: float = 0.0,
        environment: Mapping[str, str] | None = None,
        max_memory_bytes: int | None = None,
    ):
        """
        Args:
            command: program and arguments.
            pass_fds: file descriptors that the command finds open.
            output: receives what the command and its children print; None for the output of this process;
                `subprocess.PIPE` for two pipes, `stdout` and `stderr`, which are read here.
            max_output_bytes: bytes of that; what goes beyond them is left out. None for all, which the command then
                prints without a process in between.
            grace_seconds: seconds between SIGTERM and SIGKILL for the command, where it does not end on its own.
            environment: its variables; None for those of this process.
            max_memory_bytes: memory that the command and all its descendants may take together; they are killed when
                they take more. None for no limit.
        """
        self._life: int | None
        life_read, self._life = os.pipe()  # the supervisor sees the end of this process as EOF
        self._news_read, news_write = os.pipe()
        limits = [-1 if limit is None else limit for limit in (max_output_bytes, max_memory_bytes)]
        words = [str(word) for word in (life_read, news_write, *limits, grace_seconds)]
        self._grace = grace_seconds
        # a signal that comes before the supervisor can forward it waits until then
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *words, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if output in (None, subprocess.PIPE) else subprocess.STDOUT,
                pass_fds=[life_read, news_write, *pass_fds],
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the process that made it
            )
        except BaseException:
            os.close(self._life)
            os.close(self._news_read)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            raise
        finally:
            os.close(life_read)
            os.close(news_write)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        except BaseException:  # an interrupt that waited: nobody would know of this process
            self.end()
            raise

    @property
    def stdout(self) -> IO[bytes] | None:
        """Output of the command, with `subprocess.PIPE`."""
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """Errors of the command, likewise."""
        return self._process.stderr

    def poll(self) -> int | None:
        """Return the exit code of the command, negative for the signal that has ended it; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, at most `seconds`. Returns the exit code as `poll` does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def exceeded_memory(self) -> bool:
        """True where the command was killed because of its memory limit. To be called before `end`."""
        return bool(select.select([self._news_read], [], [], 0)[0]) and os.read(self._news_read, 1) == _EXCEEDED_MEMORY

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        self._process.terminate()

    def interrupt(self) -> None:
        """Send SIGINT to the command."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL to the command; then all that it has started is killed."""
        self._process.send_signal(_KILL)

    def end(self) -> None:
        """End the command and all that it has started, and wait until they have ended."""
        if self._life is None:
            return
        os.close(self._life)
        os.close(self._news_read)
        self._life = None
        if self.wait(self._grace + _ENDING_SECONDS) is None:
            self._process.kill()
            self._process.wait()


class _Supervisor:
    """The supervisor's side."""

    def __init__(
        self,
        life: int,
        news_write: int,
        max_output_bytes: int,
        max_memory_bytes: int,
        grace_seconds: float,
        command: Sequence[str],
    ):
        """Take the arguments of `SupervisedProcess`, with -1 for no limit.

        Args:
            life: pipe whose EOF is the end of the process that started this one.
            news_write: pipe for messages to it.
            max_output_bytes: of the command.
            max_memory_bytes: of the command and its descendants.
            grace_seconds: between SIGTERM and SIGKILL.
            command: program and arguments.
        """
        self._life = life
        self._says = news_write
        self._grace = grace_seconds
        self._max_memory_bytes = max_memory_bytes
        self._left = max_output_bytes
        """Bytes that may still be printed; with a negative number the output is not forwarded."""
        self._printed = os.pipe() if max_output_bytes >= 0 else None
        self._command = command
        self._wakes = os.pipe()
        self._command_pid = 0

    def run(self) -> int:
        """Run the command until it has ended. Returns its `waitpid` status, once all its descendants have ended."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.set_blocking(self._wakes[1], False)
        signal.set_wakeup_fd(self._wakes[1])
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler makes Python write to the pipe
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        self._command_pid = os.fork()
        if not self._command_pid:
            self._exec_command()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        if self._printed is not None:
            os.close(self._printed[1])
        self._close_others()
        status = self._wait()
        self._kill_all()
        if self._printed is not None:
            self._relay_rest(self._printed[0])
        return status

    def _close_others(self) -> None:
        """Close files that are meant for the command alone: the other end of a pipe must see EOF when it ends."""
        own = {self._life, self._says, *self._wakes}
        if self._printed is not None:
            own.add(self._printed[0])
        for descriptor in [int(name) for name in os.listdir("/dev/fd")]:
            if descriptor > 2 and descriptor not in own:
                with contextlib.suppress(OSError):  # the one of the listing itself
                    os.close(descriptor)

    def _exec_command(self) -> None:
        """Become the command, in the child."""
        try:
            die_with_parent()  # a supervisor that is killed cannot kill the command
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *_FORWARDED):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            os.close(self._life)
            os.close(self._says)
            if self._printed is not None:
                for stream in (1, 2):
                    os.dup2(self._printed[1], stream)
            os.execvp(self._command[0], list(self._command))
        except OSError as error:
            os.write(2, f"{self._command[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._command_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._command_pid, signal.SIGKILL if number == _KILL else number)

    def _wait(self) -> int:
        """Wait until the command has ended, or is killed since the process that started it has ended."""
        watched = [self._life, self._wakes[0]]
        if self._printed is not None:
            watched.append(self._printed[0])
        killed_at = float("inf")
        while (status := self._reap()) is None:
            until = None
            if killed_at < float("inf"):
                until = max(0.0, killed_at - time.monotonic())
            if self._max_memory_bytes >= 0:
                until = _MEMORY_POLL_SECONDS if until is None else min(until, _MEMORY_POLL_SECONDS)
                self._check_memory()
            ready, _, _ = select.select(watched, [], [], until)
            if self._wakes[0] in ready:
                os.read(self._wakes[0], _CHUNK)
            if self._printed is not None and self._printed[0] in ready and not self._relay_chunk(self._printed[0]):
                watched.remove(self._printed[0])
            if self._life in ready:  # its other end is closed
                watched.remove(self._life)
                os.kill(self._command_pid, signal.SIGTERM)
                killed_at = time.monotonic() + self._grace
            if time.monotonic() >= killed_at:
                os.kill(self._command_pid, signal.SIGKILL)
                killed_at = float("inf")
        return status

    def _check_memory(self) -> None:
        """Kill the command when all its processes take too much memory together, and report why."""
        supervised = _descendants()
        # the resident size counts pages that forks share several times; the exact size is slow to read, so it is second
        if (
            sum(map(_resident, supervised)) > self._max_memory_bytes
            and sum(map(_proportional, supervised)) > self._max_memory_bytes
        ):
            self._max_memory_bytes = -1
            with contextlib.suppress(OSError):  # the reader has ended
                os.write(self._says, _EXCEEDED_MEMORY)
            os.kill(self._command_pid, signal.SIGKILL)  # the rest follows

    def _reap(self) -> int | None:
        """Reap the children that have ended. Returns the status of the command, if it is one of them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._command_pid:
                    found = ended[1]
        return found

    def _kill_all(self) -> None:
        """Kill what is left; children of the killed become children of this process, which are killed next."""
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in _children(os.getpid()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)

    def _relay_rest(self, printed: int) -> None:
        """Forward output that was printed and not yet forwarded."""
        while select.select([printed], [], [], 0)[0]:
            if not self._relay_chunk(printed):
                return

    def _relay_chunk(self, printed: int) -> bool:
        """Forward a chunk of output. Returns True where there may be more."""
        text = os.read(printed, _CHUNK)
        if not text or self._left == 0:
            return bool(text)
        if len(text) > self._left:
            self._print(text[: self._left] + b"\n[what this process prints from here on is left out]\n")
            self._left = 0
            return True
        self._left -= len(text)
        self._print(text)
        return True

    @staticmethod
    def _print(text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk, a closed terminal: no reason to end the command
            while text:
                text = text[os.write(1, text) :]


def _children(parent: int) -> list[int]:
    """The children of a process, from /proc/PID/task/*/children: to read the state of all processes of a large machine,
    repeatedly and in every supervisor, would be slow."""
    with contextlib.suppress(OSError):
        lists = [(task / "children").read_text() for task in Path(f"/proc/{parent}/task").iterdir()]
        return [int(pid) for pid in " ".join(lists).split()]
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):  # a kernel without that file, or the process has just ended
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def _descendants() -> list[int]:
    """Children of this process, theirs, and so on; children of a process that has ended are children of this one."""
    found: list[int] = []
    new = _children(os.getpid())
    while new:
        found += new
        new = [child for pid in new for child in _children(pid)]
    return found


def _resident(pid: int) -> int:
    """Resident memory of a process in bytes, shared pages included; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional(pid: int) -> int:
    """Proportional memory of a process in bytes (PSS): of a page that several processes share, its part."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)  # a kernel without smaps_rollup


def _main(words: Sequence[str]) -> int:
    life, news_write, max_output_bytes, max_memory_bytes, grace_seconds, *command = words
    for pipe in (life, news_write):
        os.set_inheritable(int(pipe), False)
    status = _Supervisor(
        int(life), int(news_write), int(max_output_bytes), int(max_memory_bytes), float(grace_seconds), command
    ).run()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end by the same signal as the command
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
