"""Graceful stop: Ctrl-C, SIGTERM and SIGHUP end a run after the current step, with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from llmsuite.launch.ends import INTERRUPTED
from llmsuite.launch.interrupts import is_owned
from llmsuite.launch.ranks import is_repeated, stop_signals


class StopRequest:
    """Context that records the first stop signal; a second one stops the run immediately.

    An exception that a signal handler raises during an operation of Paddle becomes another exception, or aborts the
    process: in a backward pass, Python runs inside C++. So a process that llmsuite owns exits without an exception, and
    from a thread, which a long operation does not block.
    """

    def __init__(self, note: Callable[[], None] = lambda: None) -> None:
        """`note` is called in another thread at a second signal, before the process exits. In a process that llmsuite
        does not own (`launch.interrupts`), that signal raises KeyboardInterrupt instead."""
        self.signal: int | None = None
        self.is_repeated = False
        """True after a second signal, which has raised KeyboardInterrupt."""
        self._note = note
        self._ends = is_owned()
        self._previous: dict[int, Any] = {}
        self._watcher = contextlib.ExitStack()

    def requested(self) -> bool:
        """Return True after a signal."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if self._ends:
            self._watcher.enter_context(_watching(self._note))
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
            if self._ends:
                # system calls go on after a signal: Paddle's TCPStore, through which ranks find each other, fails with
                # EINTR (Paddle 3.3.1). In other processes a second signal has to reach Python before they return.
                signal.siginterrupt(number, False)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._watcher.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if not self._ends and is_repeated([self.signal, number]):
                self.is_repeated = True
                raise KeyboardInterrupt
            return
        self.signal = number
        with contextlib.suppress(RuntimeError):  # the signal interrupted a write to stdout, which is not reentrant
            print("stopping after this step, with a checkpoint; once more to stop immediately", flush=True)


@contextlib.contextmanager
def _watching(note: Callable[[], None]) -> Iterator[None]:
    """Context in which a thread receives the number of each signal, even while the main thread runs C++ code."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    _WATCHED.add(write_end)
    thread = threading.Thread(target=_watch, args=(read_end, note), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _WATCHED.discard(write_end)
        os.write(write_end, _END)  # closing the pipe may not end the thread, as a forked process may hold it open
        thread.join()
        os.close(write_end)
        os.close(read_end)


def _watch(read_end: int, note: Callable[[], None]) -> None:
    numbers: list[int] = []
    while not (found := os.read(read_end, 64)).endswith(_END):
        numbers += [number for number in found if number in stop_signals()]
        if is_repeated(numbers):
            note()
            os._exit(INTERRUPTED)


_END = b"\0"
"""Byte that ends the watching thread; 0 is no signal number."""
_WATCHED: set[int] = set()
"""File descriptors that signal numbers of this process are written to."""


def _reset_after_fork() -> None:
    """Stop writing signal numbers in a forked process, whose signals are not those of its parent."""
    if _WATCHED:
        signal.set_wakeup_fd(-1)
        _WATCHED.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
