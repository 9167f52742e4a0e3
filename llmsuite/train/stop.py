"""Ctrl-C, SIGTERM and the end of the terminal end a run after the step that is under way, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any

from llmsuite.launch.ranks import stop_signals


class StopRequest:
    """While active, the first signal is remembered and a second one interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether there was a signal."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP:  # a terminal that ends says so twice: by itself and by its shell
                return
            raise KeyboardInterrupt
        self.signal = number
        with contextlib.suppress(RuntimeError):  # it came while a line was being written, into which none can be
            print("stopping after this step, with a checkpoint; once more to stop at once", flush=True)
