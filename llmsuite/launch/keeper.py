"""A process that keeps another one with everything that it starts: when that one ends, or whoever asked for it goes,
none of them is left.

Code of others (a reward, an environment, a server) starts processes of its own: a sandbox, a prover, a browser. Killing
the one that was started here leaves those behind. So between the two stands a keeper, to which Linux hands every
descendant whose parent has ended (PR_SET_CHILD_SUBREAPER), be it in a session of its own or not.

This file is the program of the keeper too. It is started without `site` and imports nothing but the standard library,
so that it is there at once and takes little memory.
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

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING_SECONDS = 5.0
"""To wait for the keeper, once it is to end all."""
_CHUNK = 1 << 16
_LOOK_SECONDS = 0.5
"""Between two looks at the memory of all that is kept, where that has a limit."""
_TOOK_TOO_MUCH = b"M"
"""What the keeper says to the process that asked for it, before it ends what takes too much memory."""


class Kept:
    """A process that runs a command and ends with everything it has started: of its own accord, by `end`, or because
    the process that made this object is gone."""

    def __init__(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int] = (),
        output: IO[bytes] | None = None,
        most_output: int | None = None,
        grace: float = 0.0,
        environment: Mapping[str, str] | None = None,
        most_memory: int | None = None,
    ):
        """
        Args:
            command: program and words.
            pass_fds: file descriptors that the command finds open.
            output: receives what the command and its children print; None for the output of this process.
            most_output: bytes of that; what goes beyond them is left out. None for all.
            grace: seconds between SIGTERM and SIGKILL for the command, where it does not end by itself.
            environment: its variables; None for those of this process.
            most_memory: bytes that the command and all that it has started may take together; with more they are
                ended. None for no limit.
        """
        self._life: int | None
        told, self._life = os.pipe()  # the keeper sees the end of this process as the end of the pipe
        self._news, says = os.pipe()
        limits = [-1 if limit is None else limit for limit in (most_output, most_memory)]
        words = [str(word) for word in (told, says, *limits, grace)]
        self._grace = grace
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *words, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=[told, says, *pass_fds],
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the process that made it
            )
        except BaseException:
            os.close(self._life)
            os.close(self._news)
            raise
        finally:
            os.close(told)
            os.close(says)

    def poll(self) -> int | None:
        """The exit code of the command, negative for the signal that has ended it; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """`poll` once it has ended, or after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def took_too_much(self) -> bool:
        """Whether all was ended because it took more memory than it may. Asked before `end`."""
        return bool(select.select([self._news], [], [], 0)[0]) and os.read(self._news, 1) == _TOOK_TOO_MUCH

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        self._process.terminate()

    def end(self) -> None:
        """End the command and all that it has started, and wait until they are gone."""
        if self._life is None:
            return
        os.close(self._life)
        os.close(self._news)
        self._life = None
        if self.wait(self._grace + _ENDING_SECONDS) is None:
            self._process.kill()
            self._process.wait()


class _Keeper:
    """The keeper's side."""

    def __init__(self, life: int, says: int, most_output: int, most_memory: int, grace: float, command: Sequence[str]):
        """As the arguments of `Kept`; `life` and `says` are its pipes, and limits of -1 stand for none."""
        self._life, self._says, self._grace, self._most_memory = life, says, grace, most_memory
        self._left: int | None = None if most_output < 0 else most_output
        """Bytes that may still be printed."""
        self._printed, self._command = os.pipe(), command
        self._wakes = os.pipe()
        self._pid = 0

    def run(self) -> int:
        """Keep the command until it has ended; returns what `waitpid` says of it, once nothing of it is left."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.set_blocking(self._wakes[1], False)
        signal.set_wakeup_fd(self._wakes[1])
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # so that the pipe above is told
        signal.signal(signal.SIGTERM, self._forward)
        self._pid = os.fork()
        if not self._pid:
            self._become()
        os.close(self._printed[1])
        self._close_others()
        status = self._wait()
        self._kill_all()
        self._relay(0.0)
        return status

    def _close_others(self) -> None:
        """Close what the command alone is to have: whoever holds the other end of a pipe sees at once that it ends."""
        own = {self._life, self._says, self._printed[0], *self._wakes}
        for descriptor in [int(name) for name in os.listdir("/dev/fd")]:
            if descriptor > 2 and descriptor not in own:
                with contextlib.suppress(OSError):  # the one of the listing itself
                    os.close(descriptor)

    def _become(self) -> None:
        """Become the command, in the child."""
        try:
            if sys.platform == "linux":  # a keeper that is killed itself cannot kill it
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.close(self._life)
            os.close(self._says)
            for stream in (1, 2):
                os.dup2(self._printed[1], stream)
            os.execvp(self._command[0], list(self._command))
        except OSError as error:
            os.write(2, f"{self._command[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _wait(self) -> int:
        """Until the command has ended, or is killed because nobody wants it any more."""
        watched, killed_at = [self._life, self._wakes[0], self._printed[0]], float("inf")
        while (status := self._reap()) is None:
            until = max(0.0, killed_at - time.monotonic()) if killed_at < float("inf") else None
            if self._most_memory >= 0:
                until = _LOOK_SECONDS if until is None else min(until, _LOOK_SECONDS)
                self._look_at_memory()
            ready, _, _ = select.select(watched, [], [], until)
            if self._wakes[0] in ready:
                os.read(self._wakes[0], _CHUNK)
            if self._printed[0] in ready and not self._pass_on():
                watched.remove(self._printed[0])
            if self._life in ready:  # its other end is closed
                watched.remove(self._life)
                os.kill(self._pid, signal.SIGTERM)
                killed_at = time.monotonic() + self._grace
            if time.monotonic() >= killed_at:
                os.kill(self._pid, signal.SIGKILL)
                killed_at = float("inf")
        return status

    def _look_at_memory(self) -> None:
        """End all when it takes too much memory together, and say why."""
        kept = _descendants()
        # what forks share is counted once, which is more to compute
        if sum(map(_resident, kept)) > self._most_memory and sum(map(_proportional, kept)) > self._most_memory:
            self._most_memory = -1
            with contextlib.suppress(OSError):  # nobody reads any more
                os.write(self._says, _TOOK_TOO_MUCH)
            os.kill(self._pid, signal.SIGKILL)  # the rest follows

    def _reap(self) -> int | None:
        """Take note of those that have ended; the status of the command, if it is one of them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
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

    def _relay(self, seconds: float) -> None:
        """Pass on what was printed and not yet passed on."""
        while select.select([self._printed[0]], [], [], seconds)[0]:
            if not self._pass_on():
                return

    def _pass_on(self) -> bool:
        """Pass on a part of what was printed; whether there may be more."""
        text = os.read(self._printed[0], _CHUNK)
        if not text or self._left == 0:
            return bool(text)
        if self._left is not None and len(text) > self._left:
            self._say(text[: self._left] + b"\n[what this process prints from here on is left out]\n")
            self._left = 0
            return True
        if self._left is not None:
            self._left -= len(text)
        self._say(text)
        return True

    @staticmethod
    def _say(text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk, a terminal that is gone: no reason to end the command
            while text:
                text = text[os.write(1, text) :]


def _children(parent: int) -> list[int]:
    """The children of a process. The kernel lists them by the thread that has started each; to look through all
    processes of a large machine, now and then and in every keeper, would cost much."""
    with contextlib.suppress(OSError):
        lists = [(task / "children").read_text() for task in Path(f"/proc/{parent}/task").iterdir()]
        return [int(pid) for pid in " ".join(lists).split()]
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):  # a kernel that does not list them, or it has just ended
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
    """Bytes of memory that a process has, shared ones too; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional(pid: int) -> int:
    """Bytes of memory that a process has; of a page that several share, its part."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)  # a kernel that does not tell


def _main(words: Sequence[str]) -> int:
    life, says, most_output, most_memory, grace, *command = words
    for pipe in (life, says):
        os.set_inheritable(int(pipe), False)
    status = _Keeper(int(life), int(says), int(most_output), int(most_memory), float(grace), command).run()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end in the way in which the command has ended
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
