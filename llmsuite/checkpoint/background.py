"""Writes in a background thread while training continues: in order, and without losing an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path


class Writer:
    """Runs tasks that write to disk, in order. When a task fails, those queued after it are dropped."""

    def __init__(self, in_background: bool):
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self._tasks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def start(self, task: Callable[[], None]) -> None:
        """Wait for the tasks before, then run this one: here, or in the background. Raises the errors of either."""
        self.wait()
        self.follow(task)

    def follow(self, task: Callable[[], None]) -> None:
        """Queue a small task after the present ones, without waiting."""
        if not self._in_background:
            task()
            return
        with self._lock:
            if self._error is not None:  # a task has failed; `wait` raises its error
                return
            self._tasks.append(task)
            if len(self._tasks) > 1:
                return  # the running thread takes it
        # a daemon, so that a second Ctrl-C does not wait: a partial checkpoint has no manifest and does not count
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a task that has ended; do not wait for one that is running."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until all tasks are done. Raises the error of a task."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            try:
                self._tasks[0]()
            except BaseException as error:  # raised again in the thread that waits
                self._error = error
            with self._lock:
                if self._error is not None:
                    self._tasks.clear()
                else:
                    self._tasks.pop(0)
                if not self._tasks:
                    return


def room_for_copy(num_bytes: int) -> bool:
    """Return True if a copy of this many bytes fits into the memory of this machine, with a tenth to spare."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: leave it to the recipe
        return True
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    return available is None or num_bytes * 1.1 < available
