"""Tasks in several threads: all of them run, errors come out, and a system that gives no threads is no hindrance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from llmsuite.base.threads import map_in_threads, num_threads, run_all


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_runs_once(threads: int) -> None:
    done: list[int] = []

    def task(number: int) -> Callable[[], None]:
        return lambda: done.append(number)

    run_all((task(i) for i in range(50)), threads)
    assert sorted(done) == list(range(50))
    assert threads > 1 or done == sorted(done)


def test_two_tasks_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60)
    run_all([lambda: both.wait() and None, lambda: both.wait() and None], 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_out_and_ends_it(threads: int) -> None:
    done: list[int] = []

    def tasks() -> Iterator[Callable[[], None]]:
        for number in range(1000):
            yield (lambda: done.append(1)) if number != 20 else fail

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        run_all(tasks(), threads)
    assert len(done) < 900


def test_what_makes_the_tasks_may_fail_too() -> None:
    def tasks() -> Iterator[Callable[[], None]]:
        yield lambda: None
        raise KeyError("third")

    with pytest.raises(KeyError, match="third"):
        run_all(tasks(), 3)


def test_without_memory_for_threads_tasks_run_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    where: list[threading.Thread] = []
    run_all([lambda: where.append(threading.current_thread())] * 3, 4)
    assert where == [threading.current_thread()] * 3


def test_a_map_in_order() -> None:
    assert list(map_in_threads(lambda x: x * x, range(100))) == [x * x for x in range(100)]
    assert list(map_in_threads(str, [])) == []
    assert num_threads() >= 1
