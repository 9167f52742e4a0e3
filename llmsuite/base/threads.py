"""Several threads for work that releases the GIL: hashing, reading and writing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_MAX_THREADS = 8  # beyond that the disk is the bottleneck


def num_threads() -> int:
    """Number of cores of this process, up to a limit."""
    if sys.platform == "linux":
        return min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    return 1


def run_all(tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Run tasks in up to `threads` threads, this one included; fewer where no more can be started. They start in order.

    After a task fails no other is started, and its error is raised here.
    """
    todo = iter(tasks)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while True:
            try:
                with lock:
                    task = None if errors else next(todo, None)
                if task is None:
                    return
                task()
            except BaseException as error:  # raised again in the calling thread
                errors.append(error)

    others = [threading.Thread(target=work, daemon=True) for _ in range(threads - 1)]
    started = []
    try:
        for thread in others:
            thread.start()
            started.append(thread)
    except RuntimeError:  # no memory for its stack
        pass
    try:
        work()
        for thread in started:
            thread.join()
    except BaseException as error:  # Ctrl-C while waiting
        errors.append(error)
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]


def map_in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply a function to items in several threads; like `map`, results are in the order of the items."""
    todo = list(items)
    threads = num_threads()
    for first in range(0, len(todo), 8 * threads):
        group = todo[first : first + 8 * threads]
        results: dict[int, R] = {}

        def task(at: int, item: T, results: dict[int, R] = results) -> Callable[[], None]:
            return lambda: results.__setitem__(at, function(item))

        run_all((task(at, item) for at, item in enumerate(group)), threads)
        yield from (results[at] for at in range(len(group)))
