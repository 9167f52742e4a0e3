"""Interrupts (Ctrl-C) that wait until code which they would break has ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Context in which Ctrl-C has no effect before its end.

    For code that removes what it has made; and for code in which Paddle runs Python inside C++, such as the
    construction of a program, where it records the call stack of each operation: an exception of a signal handler there
    is a segmentation fault (Paddle 3.3.1). Outside the main thread, and where SIGINT has no handler in Python, nothing
    is changed, as no exception is raised there.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)
