"""Ctrl-C, SIGTERM and the end of the terminal end a run after the step that is under way, with a checkpoint."""

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
    """While active, the first signal is remembered, and a second one stops at once.

    An exception that is raised where a signal meets an operation of Paddle's becomes another one, or the process ends
    by it: in a backward pass, Python runs inside of C++. So a process that may be ended ends without one, and from a
    thread, which a long operation does not hold up.
    """

    def __init__(self, note: Callable[[], None] = lambda: None) -> None:
        """`note` records that this process ends, called in another thread at a second signal; where the process is not
        llmsuite's own (`launch.interrupts`), that signal raises KeyboardInterrupt."""
        self.signal: int | None = None
        self.is_repeated = False
        """Whether there was a second signal, which has raised KeyboardInterrupt."""
        self._note, self._ends = note, is_owned()
        self._previous: dict[int, Any] = {}
        self._during = contextlib.ExitStack()

    def requested(self) -> bool:
        """Whether there was a signal."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if self._ends:
            self._during.enter_context(_watching(self._note))
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._during.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if not self._ends and is_repeated([self.signal, number]):
                self.is_repeated = True
                raise KeyboardInterrupt
            return
        self.signal = number
        with contextlib.suppress(RuntimeError):  # it came while a line was being written, into which none can be
            print("stopping after this step, with a checkpoint; once more to stop at once", flush=True)


@contextlib.contextmanager
def _watching(note: Callable[[], None]) -> Iterator[None]:
    """While active, a thread gets the number of each signal, whatever the main thread is doing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _WATCHED.add(writing)
    thread = threading.Thread(target=_watch, args=(reading, note), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _WATCHED.discard(writing)
        os.write(writing, _END)  # a fork that is still there may hold the pipe open, so its end is none
        thread.join()
        os.close(writing)
        os.close(reading)


def _watch(reading: int, note: Callable[[], None]) -> None:
    numbers: list[int] = []
    while not (found := os.read(reading, 64)).endswith(_END):
        numbers += [number for number in found if number in stop_signals()]
        if is_repeated(numbers):
            note()
            os._exit(INTERRUPTED)


_END = b"\0"
"""No number of a signal: ends the thread that gets these."""
_WATCHED: set[int] = set()
"""Where signals are written to in this process."""


def _forget() -> None:
    """In a fork: what it gets is nothing that its parent was sent."""
    if _WATCHED:
        signal.set_wakeup_fd(-1)
        _WATCHED.clear()


os.register_at_fork(after_in_child=_forget)
