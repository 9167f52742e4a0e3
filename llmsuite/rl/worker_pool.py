"""A pool of worker processes for user code, such as rewards and environments, with a time limit for each call: a
process that hangs is killed, and the others continue.

The processes are started as new programs, not forked: they have neither Paddle nor its threads, and import nothing from
the training program.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import selectors
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.supervisor import SupervisedProcess
from llmsuite.rl.channel import BadMessage, Channel
from llmsuite.rl.worker import Source

_LOADING_SECONDS = 120.0
_ENDING_SECONDS = 5.0
"""Seconds to wait for the exit code of a process that has closed its end of the pipe."""
MOST_PRINTED = 16 << 20
"""Maximum number of bytes that a process may print into the log of its rank."""
_GIB = 1 << 30
_CHUNKS = 4
"""Number of parts in which a process gets its share of the calls, so that none is idle while another has many left."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from llmsuite.rl.worker import main; main({pipe})"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function."""

    which: int
    """Index of the source."""
    payload: Any
    """The argument of the function."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    values: Any
    """The value that the function returned."""
    why: str = ""
    """The reason for which the first missing value is missing; empty when none is."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of worker processes, from a section of the recipe."""

    section: str
    """The name of the section, for messages."""
    workers: int
    """Number of processes."""
    time_limit: float
    """Seconds for a call."""
    memory_limit: float
    """GiB of a process together with its children."""


class _Worker:
    """One process, and its outstanding calls in order."""

    def __init__(self, sources: Sequence[Source], limits: Limits):
        self._limits = limits
        self.channel = Channel()
        try:
            pipe = self.channel.other.fileno()
            self._process = SupervisedProcess(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path, pipe=pipe)],
                [pipe],
                max_output_bytes=MOST_PRINTED,
                max_memory_bytes=round(limits.memory_limit * _GIB),
            )
        finally:
            self.channel.other.close()
        with contextlib.suppress(ConnectionError):  # a process that has just ended: its code says why
            self.channel.send(list(sources))
        self.outstanding: collections.deque[int] = collections.deque()
        self.deadline = time.monotonic() + _LOADING_SECONDS
        self.is_ready = False
        self.fault = ""
        """The reason if it has sent an invalid message; else empty."""

    def assign(self, numbers: Sequence[int], calls: Sequence[Call]) -> None:
        """Send calls. The time of the first one starts now."""
        assert not self.outstanding
        self.outstanding.extend(numbers)
        # a process that has just ended is handled when its results are read
        with contextlib.suppress(ConnectionError):
            self.channel.send([(n, calls[n].which, calls[n].payload) for n in numbers])
        self.deadline = time.monotonic() + self._limits.time_limit

    def is_unusable(self) -> bool:
        """Return True if an idle process has ended, was killed for its memory, or has sent an unexpected message."""
        return self.channel.has_input() or self._process.poll() is not None

    def end(self) -> str:
        """Kill the process and its children. Returns the reason if it had ended before, else an empty text."""
        self.channel.close()
        code = None
        if not self.fault:
            # a deadline of 0 stands for a pipe that the process has closed: then it is about to exit
            code = self._process.wait(0.0 if self.deadline else _ENDING_SECONDS)
        exceeded_memory = self._process.exceeded_memory()
        self._process.end()
        if exceeded_memory:
            limit = f"{self._limits.memory_limit:g} GiB ({self._limits.section}.memory_limit)"
            return f"its process took more than {limit}"
        if code is None:
            return self.fault
        if code < 0:
            return f"its process was killed by signal {-code}"
        return f"its process ended with exit code {code}"


def _is_result(message: Any, outstanding: Sequence[int]) -> bool:
    """Return True if a message is a result of the first outstanding call."""
    return (
        isinstance(message, tuple)
        and len(message) == 3
        and bool(outstanding)
        and message[0] == outstanding[0]
        and isinstance(message[2], str)
    )


class WorkerPool:
    """Makes calls in worker processes, which are started on first use; `load` starts one."""

    def __init__(self, sources: Sequence[Source], limits: Limits):
        """
        Args:
            sources: of the functions; a call refers to one by its index.
            limits: of the processes.
        """
        self._sources = sources
        self._limits = limits
        self._workers: list[_Worker] = []

    def load(self) -> None:
        """Start a process, if there is a source to load, and wait until it is ready.

        Raises:
            UserError: a source cannot be loaded.
        """
        if self._workers or all(source.in_main for source in self._sources):
            return
        first = _Worker(self._sources, self._limits)
        self._workers.append(first)
        try:
            while not first.is_ready:
                assert not [*self._receive(), *self._handle_timeouts(collections.deque(), [])], "results without calls"
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """Make calls. Yields the number and the result of each, in the order of completion. A call that raises, times
        out or ends its process has the values of `Source.failed_result`.

        Raises:
            UserError: a source cannot be loaded.
        """
        queued = collections.deque(range(len(calls)))
        left = len(calls)
        size = max(1, len(calls) // (self._limits.workers * _CHUNKS))
        try:
            while left:
                self._assign(queued, calls, size)
                for number, outcome in [*self._receive(), *self._handle_timeouts(queued, calls)]:
                    left -= 1
                    yield number, outcome
        except BaseException:
            self.close()  # the processes are still working on calls
            raise

    def close(self) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _assign(self, queued: collections.deque[int], calls: Sequence[Call], size: int) -> None:
        """Assign calls to idle processes, and start missing processes."""
        for worker in [w for w in self._workers if w.is_ready and not w.outstanding and w.is_unusable()]:
            self._workers.remove(worker)  # it was idle, so no call has failed
            worker.end()
        while len(self._workers) < self._limits.workers and len(self._workers) < len(calls):
            self._workers.append(_Worker(self._sources, self._limits))
        for worker in self._workers:
            if worker.is_ready and not worker.outstanding and queued:
                worker.assign([queued.popleft() for _ in range(min(size, len(queued)))], calls)

    def _receive(self) -> Iterator[tuple[int, Outcome]]:
        """Wait for the first result or the next deadline. Yields the results that have arrived."""
        busy = [worker for worker in self._workers if worker.outstanding or not worker.is_ready]
        deadline = min((worker.deadline for worker in busy), default=0.0)
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                events = selectors.EVENT_READ
                if worker.channel.has_unsent:
                    events |= selectors.EVENT_WRITE
                selector.register(worker.channel, events, worker)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        for key, events in ready:
            yield from self._exchange(key.data, bool(events & selectors.EVENT_READ))

    def _exchange(self, worker: _Worker, has_input: bool) -> Iterator[tuple[int, Outcome]]:
        """Send the rest of the calls of a worker. Yields the results that it has sent, where it `has_input`."""
        try:
            worker.channel.flush()
            for message in worker.channel.receive() if has_input else ():
                yield from self._take(worker, message)
        except (EOFError, ConnectionError):
            worker.deadline = 0.0  # it has ended; `_handle_timeouts` removes it
        except BadMessage as error:
            worker.fault = f"its process sent no result ({error})"
            worker.deadline = 0.0

    def _take(self, worker: _Worker, message: Any) -> Iterator[tuple[int, Outcome]]:
        """Handle a message of a worker. Yields the result that it is. Raises BadMessage; UserError: a source cannot be
        loaded."""
        if worker.is_ready and not _is_result(message, worker.outstanding):
            raise BadMessage("not the one that is due")
        worker.deadline = time.monotonic() + self._limits.time_limit
        if worker.is_ready:
            number, values, why = message
            worker.outstanding.popleft()
            yield number, Outcome(values, why)
        elif message is not None:
            raise UserError(message)
        worker.is_ready = True

    def _handle_timeouts(self, queued: collections.deque[int], calls: Sequence[Call]) -> Iterator[tuple[int, Outcome]]:
        """Kill processes that have passed their deadline or have ended. The current call of each has failed; its other
        calls are queued again."""
        now = time.monotonic()
        for worker in [w for w in self._workers if (w.outstanding or not w.is_ready) and w.deadline <= now]:
            self._workers.remove(worker)
            how = worker.end()
            if not worker.is_ready:
                names = ", ".join(source.key for source in self._sources)
                how = how or f"it was not ready after {_LOADING_SECONDS:.0f} s"
                raise UserError(f"{self._limits.section}: a process could not load {names}: {how}")
            number = worker.outstanding.popleft()
            queued.extendleft(reversed(worker.outstanding))
            call = calls[number]
            why = how or f"it took longer than {self._limits.time_limit:g} s ({self._limits.section}.time_limit)"
            yield number, Outcome(self._sources[call.which].failed_result(call.payload), why)
