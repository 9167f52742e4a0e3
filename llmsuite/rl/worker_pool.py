"""Processes that run somebody else's code, each call within a time limit: what hangs is killed, and the others go on.
Rewards and environments are such code.

The processes are programs of their own, not forks: they begin without Paddle and its threads, and import nothing of the
program that trains.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from llmsuite.errors import UserError
from llmsuite.launch.keeper import Kept
from llmsuite.rl.worker import Source

_LOADING_SECONDS = 120.0
_ENDING_SECONDS = 5.0
"""To wait for the exit code of a process whose end of the pipe is closed."""
MOST_PRINTED = 16 << 20
"""Bytes that a process may print into the log of its rank."""
_GIB = 1 << 30
_CHUNKS = 4
"""Parts of its share that a process gets one after the other: enough that none is idle while another has much left."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from llmsuite.rl.worker import main; main({pipe})"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call."""

    which: int
    """Number of the source."""
    payload: Any
    """What its function gets."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    values: Any
    """What the function returned."""
    why: str = ""
    """Why the first value is missing that is."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a section of the recipe says of the processes that run its code."""

    section: str
    """Its name, for messages."""
    workers: int
    """Processes."""
    time_limit: float
    """Seconds for a call."""
    memory_limit: float
    """GiB of a process, with all that it has started."""


class _Worker:
    """One process, and the calls it has been given, in their order."""

    def __init__(self, sources: Sequence[Source], limits: Limits):
        self._limits = limits
        self.connection, other = multiprocessing.Pipe()
        try:
            program = _PROGRAM.format(path=sys.path, pipe=other.fileno())
            self._process = Kept(
                [sys.executable, "-c", program],
                [other.fileno()],
                most_output=MOST_PRINTED,
                most_memory=round(limits.memory_limit * _GIB),
            )
        finally:
            other.close()
        self.connection.send(list(sources))
        self.given: collections.deque[int] = collections.deque()
        self.deadline = time.monotonic() + _LOADING_SECONDS
        self.is_ready = False
        self.fault = ""
        """What is wrong with what it has sent."""

    def give(self, numbers: Sequence[int], calls: Sequence[Call]) -> None:
        """Hand over calls. The time of the first begins now."""
        assert not self.given
        self.given.extend(numbers)
        with contextlib.suppress(
            ConnectionError
        ):  # it has just ended, which is noticed when its results are waited for
            self.connection.send([(n, calls[n].which, calls[n].payload) for n in numbers])
        self.deadline = time.monotonic() + self._limits.time_limit

    def is_gone(self) -> bool:
        """Whether it has ended by itself, was ended for its memory, or sends what nobody has asked for. Asked while it
        has no call."""
        return self.connection.poll() or self._process.poll() is not None

    def end(self) -> str:
        """Kill it, and what it has started; returns how it ended by itself, if it had."""
        self.connection.close()
        code = None if self.fault else self._process.wait(0.0 if self.deadline else _ENDING_SECONDS)
        took_too_much = self._process.took_too_much()
        self._process.end()
        if took_too_much:
            limit = f"{self._limits.memory_limit:g} GiB ({self._limits.section}.memory_limit)"
            return f"its process took more than {limit}"
        if code is None:
            return self.fault
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit code {code}"


def _is_result(message: Any, given: Sequence[int]) -> bool:
    """Whether this is what a process sends of the first of the calls it has."""
    return (
        isinstance(message, tuple)
        and len(message) == 3
        and bool(given)
        and message[0] == given[0]
        and isinstance(message[2], str)
    )


class WorkerPool:
    """Makes calls in processes. They are started when they are first needed, but for the one of `load`."""

    def __init__(self, sources: Sequence[Source], limits: Limits):
        """
        Args:
            sources: of the functions; a call names one by its number here.
            limits: of the section that all this is from.
        """
        self._sources, self._limits = sources, limits
        self._workers: list[_Worker] = []

    def load(self) -> None:
        """Start a process, if there is anything to load, and wait until it is ready.

        Raises:
            UserError: a source cannot be loaded.
        """
        if self._workers or all(source.here for source in self._sources):
            return
        first = _Worker(self._sources, self._limits)
        self._workers.append(first)
        try:
            while not first.is_ready:
                assert not [*self._news(), *self._late(collections.deque(), [])], "results without calls"
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """Number and result of each call, in the order in which they come. What raises, takes too long or ends its
        process has no values.

        Raises:
            UserError: a source cannot be loaded.
        """
        todo, left = collections.deque(range(len(calls))), len(calls)
        size = max(1, len(calls) // (self._limits.workers * _CHUNKS))
        try:
            while left:
                self._hand_out(todo, calls, size)
                for number, outcome in [*self._news(), *self._late(todo, calls)]:
                    left -= 1
                    yield number, outcome
        except BaseException:
            self.close()  # they are in the middle of something
            raise

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _hand_out(self, todo: collections.deque[int], calls: Sequence[Call], size: int) -> None:
        """Give calls to processes that have none, and start processes that are missing."""
        for worker in [w for w in self._workers if w.is_ready and not w.given and w.is_gone()]:
            self._workers.remove(worker)  # in its spare time, so no call is to blame
            worker.end()
        while len(self._workers) < self._limits.workers and len(self._workers) < len(calls):
            self._workers.append(_Worker(self._sources, self._limits))
        for worker in self._workers:
            if worker.is_ready and not worker.given and todo:
                worker.give([todo.popleft() for _ in range(min(size, len(todo)))], calls)

    def _news(self) -> Iterator[tuple[int, Outcome]]:
        """Results that have come; waits for the first, or for the next deadline."""
        busy = {worker.connection: worker for worker in self._workers if worker.given or not worker.is_ready}
        until = min((worker.deadline for worker in busy.values()), default=0.0)
        for connection in multiprocessing.connection.wait(list(busy), max(0.0, until - time.monotonic())):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            try:
                message = connection.recv()
            except (EOFError, ConnectionError):
                worker.deadline = 0.0  # it is gone: see `_late`
                continue
            except Exception as error:  # somebody's code has written into the pipe: reading that fails in any way
                worker.fault, worker.deadline = f"its process sent no result ({type(error).__name__})", 0.0
                continue
            if worker.is_ready and not _is_result(message, worker.given):
                worker.fault, worker.deadline = "its process sent no result", 0.0
                continue
            worker.deadline = time.monotonic() + self._limits.time_limit
            if worker.is_ready:
                number, values, why = message
                worker.given.popleft()
                yield number, Outcome(values, why)
            elif message is not None:
                raise UserError(message)
            worker.is_ready = True

    def _late(self, todo: collections.deque[int], calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """End processes whose time is over or that are gone. The call each was at has failed; its others are done
        again."""
        now = time.monotonic()
        for worker in [w for w in self._workers if (w.given or not w.is_ready) and w.deadline <= now]:
            self._workers.remove(worker)
            how = worker.end()
            if not worker.is_ready:
                names = ", ".join(source.key for source in self._sources)
                how = how or f"it was not ready after {_LOADING_SECONDS:.0f} s"
                raise UserError(f"{self._limits.section}: a process could not load {names}: {how}")
            number = worker.given.popleft()
            todo.extendleft(reversed(worker.given))
            call = calls[number]
            why = how or f"it took longer than {self._limits.time_limit:g} s ({self._limits.section}.time_limit)"
            yield number, Outcome(self._sources[call.which].nothing(call.payload), why)
