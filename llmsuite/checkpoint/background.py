"""Writes in a thread of its own while training goes on: in order, and no error is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path


class Writer:
    """Runs tasks that write to disk, in the order they come. After one that fails the ones behind it are dropped."""

    def __init__(self, in_background: bool):
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self._tasks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def start(self, task: Callable[[], None]) -> None:
        """Wait for what is under way, then run this: here, or in the background. Raises what they raise."""
        self.wait()
        self.follow(task)

    def follow(self, task: Callable[[], None]) -> None:
        """Run a small task behind what is under way, without waiting."""
        if not self._in_background:
            task()
            return
        with self._lock:
            self._tasks.append(task)
            if len(self._tasks) > 1:
                return  # the thread that runs the others finds it
        # a daemon: a second Ctrl-C does not wait for it, and what it leaves half done is no checkpoint
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what a task has raised that is done; do not wait for one that is not."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is under way. Raises what a task raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
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
    """Whether a copy of so many bytes fits into the memory of this machine, with a tenth to spare."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: the recipe knows better
        return True
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    return available is None or num_bytes * 1.1 < available
