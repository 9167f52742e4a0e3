"""The thread that decodes: requests of all clients share one batch, which they join and leave at any pass."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from llmsuite.inference.batch import Batch, Line
from llmsuite.inference.decoder import Decoder
from llmsuite.inference.shared_prefixes import SharedPrefixes
from llmsuite.serving.metrics import Metrics

Listener = Callable[[str, bool], None]
"""Called in the scheduler's thread with the text that became certain, and whether the line has ended."""


class Busy(Exception):
    """As many requests wait as are allowed to."""


class Paused(Exception):
    """Nothing new is begun until `Scheduler.resume`."""


class Closing(Exception):
    """The server is shutting down."""


class Scheduler:
    """Decodes lines, and calls their listeners with the text. Between two passes it calls functions that use the model
    otherwise."""

    def __init__(
        self,
        decoder: Decoder,
        metrics: Metrics,
        batch_size: int,
        max_waiting: int,
        prefixes: SharedPrefixes | None = None,
    ):
        """
        Args:
            decoder: the model; only the scheduler's thread uses it from here on.
            metrics: updated at every pass.
            batch_size: lines that are decoded together.
            max_waiting: lines that may be queued.
            prefixes: of prompts, which are not read again; used where the decoder `shares_prefixes`.
        """
        self._decoder, self._metrics = decoder, metrics
        self._batch_size, self._max_waiting = batch_size, max_waiting
        self._prefixes = prefixes if getattr(decoder, "shares_prefixes", False) else None
        self._batch = self._new_batch()
        self._listeners: dict[Line, Listener] = {}
        self._waiting: collections.deque[Line] = collections.deque()
        self._cancelled: list[Line] = []
        self._calls: collections.deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = collections.deque()
        self._changed = threading.Condition()
        self.is_paused = False
        self._is_resting = False
        """Whether the thread waits for something to do."""
        self._is_closing = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Begin nothing new: what waits fails with `Closing`, and what has begun goes on."""
        with self._changed:
            self._is_closing = True
            waiting, calls = list(self._waiting), list(self._calls)
            self._waiting.clear()
            self._calls.clear()
            self._changed.notify_all()
        self._fail(waiting, Closing())
        for _, future in calls:
            future.cancel()

    def stop(self) -> None:
        """End the thread after the pass it is in; lines that are open fail with `Closing`."""
        self.close()
        self.give_up()
        self._thread.join()

    def give_up(self) -> None:
        """Let the thread end after the pass it is in."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def submit(self, lines: Sequence[Line], listeners: Sequence[Listener]) -> None:
        """Queue lines, all of them or none. Raises Busy, Closing or Paused."""
        with self._changed:
            if self._is_closing:
                raise Closing
            if self.is_paused:
                raise Paused
            if len(self._waiting) + len(lines) > self._max_waiting:
                raise Busy
            self._listeners.update(zip(lines, listeners))
            self._waiting.extend(lines)
            self._changed.notify_all()

    def cancel(self, lines: Sequence[Line]) -> None:
        """Stop decoding lines that no client waits for any more."""
        with self._changed:
            self._cancelled += [line for line in lines if line in self._listeners]
            self._changed.notify_all()

    def call(self, work: Callable[[], Any], while_paused: bool = False) -> concurrent.futures.Future[Any]:
        """Let the thread call a function between two passes; its result, or what it raises, is in the future.

        Args:
            work: has the model for itself while it runs.
            while_paused: whether it is called in a pause too.

        Raises:
            Busy: too much waits.
            Closing: nothing new is begun any more.
            Paused: there is a pause.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            if self._is_closing:
                raise Closing
            if self.is_paused and not while_paused:
                raise Paused
            if len(self._calls) >= self._max_waiting:
                raise Busy
            self._calls.append((work, future))
            self._changed.notify_all()
        return future

    def pause(self, timeout: float) -> bool:
        """Begin nothing new, and wait until what has begun is at its end; whether it came to that in so many
        seconds."""
        with self._changed:
            self.is_paused = True
            return self._changed.wait_for(lambda: self._is_resting and not (self._waiting or self._calls), timeout)

    def resume(self) -> None:
        """Begin new lines and calls again."""
        with self._changed:
            self.is_paused = False

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or self._cancelled or self._batch.lines or self._calls):
                    self._is_resting = True
                    self._changed.notify_all()
                    self._changed.wait()
                self._is_resting = False
                if self._stopping:
                    break
                call = self._calls.popleft() if self._calls else None
                for line in self._cancelled:
                    self._listeners.pop(line, None)
                    if line in self._waiting:
                        self._waiting.remove(line)
                cancelled, self._cancelled = self._cancelled, []
                free = self._batch_size - len(self._batch.lines) + sum(line in cancelled for line in self._batch.lines)
                new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
                self._metrics.waiting.set(len(self._waiting))
            if call is not None:
                _answer(*call)
            self._batch.drop(cancelled)
            if new or self._batch.lines:
                self._advance(new)
            self._metrics.running.set(len(self._batch.lines))
        self._fail(list(self._listeners), Closing())

    def _advance(self, new: Sequence[Line]) -> None:
        """Make a pass. Where it fails, the batch is as before, and those that are new fail, each by itself; without
        any, the whole batch."""
        try:
            steps = self._batch.advance(new)
            self._count_known(new)
        except Exception as error:  # whatever it is, the clients get an error and the server goes on
            if len(new) > 1:
                for line in new:
                    self._advance([line])
                return
            traceback.print_exception(error)
            failed = list(new)
            if not failed:
                failed, self._batch = self._batch.lines, self._new_batch()
            self._fail(failed, error)
        else:
            self._notify(steps)

    def _new_batch(self) -> Batch:
        return Batch(self._decoder, fails_alone=True, prefixes=self._prefixes)

    def forget_prefixes(self) -> None:
        """The weights are others. In the scheduler's thread."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def _count_known(self, new: Sequence[Line]) -> None:
        if self._prefixes is not None and new:
            self._metrics.prefix_hits.inc(sum(line.num_known > 0 for line in new))
            self._metrics.prefix_tokens.inc(sum(line.num_known for line in new))
            self._metrics.prefix_bytes.set(self._prefixes.num_bytes)

    def _notify(self, steps: Sequence[tuple[Line, str]]) -> None:
        self._metrics.passes.inc()
        self._metrics.generated_tokens.inc(sum(line.error is None for line, _ in steps))
        for line, text in steps:
            if line.error is not None:
                traceback.print_exception(line.error)
                self._fail([line], line.error)
                continue
            with self._changed:
                listener = self._listeners.get(line)
                if line.finished:
                    self._listeners.pop(line, None)
            if listener is not None:
                listener(text, line.finished is not None)

    def _fail(self, lines: Sequence[Line], error: Exception) -> None:
        for line in lines:
            with self._changed:
                listener = self._listeners.pop(line, None)
            if listener is not None:
                line.error = error
                listener("", True)  # it has ended and is not finished


def _answer(work: Callable[[], Any], future: concurrent.futures.Future[Any]) -> None:
    """Call a function for its future, unless nobody waits any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:  # whatever it is, it is for the one who waits, and the server goes on
        future.set_exception(error)
