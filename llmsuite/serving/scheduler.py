"""The thread that decodes: requests of all clients share one batch, which they join and leave at any pass."""

from __future__ import annotations

import collections
import threading
import traceback
from collections.abc import Callable, Sequence

from llmsuite.inference.batch import Batch, Line
from llmsuite.inference.decoder import Decoder
from llmsuite.serving.metrics import Metrics

Listener = Callable[[str, bool], None]
"""Called in the scheduler's thread with the text that became certain, and whether the line has ended."""


class Busy(Exception):
    """As many requests wait as are allowed to."""


class Scheduler:
    """Decodes lines, and calls their listeners with the text."""

    def __init__(self, decoder: Decoder, metrics: Metrics, batch_size: int, max_waiting: int):
        """
        Args:
            decoder: the model; only the scheduler's thread uses it from here on.
            metrics: updated at every pass.
            batch_size: lines that are decoded together.
            max_waiting: lines that may be queued.
        """
        self._decoder, self._metrics = decoder, metrics
        self._batch_size, self._max_waiting = batch_size, max_waiting
        self._batch = Batch(decoder)
        self._listeners: dict[Line, Listener] = {}
        self._waiting: collections.deque[Line] = collections.deque()
        self._cancelled: list[Line] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the pass it is in; lines that are open end as failed."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def submit(self, lines: Sequence[Line], listeners: Sequence[Listener]) -> None:
        """Queue lines, all of them or none. Raises Busy."""
        with self._changed:
            if self._stopping or len(self._waiting) + len(lines) > self._max_waiting:
                raise Busy
            self._listeners.update(zip(lines, listeners))
            self._waiting.extend(lines)
            self._changed.notify()

    def cancel(self, lines: Sequence[Line]) -> None:
        """Stop decoding lines that no client waits for any more."""
        with self._changed:
            self._cancelled += [line for line in lines if line in self._listeners]
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or self._cancelled or self._batch.lines):
                    self._changed.wait()
                if self._stopping:
                    break
                for line in self._cancelled:
                    self._listeners.pop(line, None)
                    if line in self._waiting:
                        self._waiting.remove(line)
                cancelled, self._cancelled = self._cancelled, []
                free = self._batch_size - len(self._batch.lines) + sum(line in cancelled for line in self._batch.lines)
                new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
                self._metrics.waiting.set(len(self._waiting))
            try:
                self._batch.drop(cancelled)
                if new or self._batch.lines:
                    self._notify(self._batch.advance(new))
            except Exception:  # whatever it is, the clients get an error and the server goes on
                traceback.print_exc()
                lines = {*self._batch.lines, *new}
                self._batch = Batch(self._decoder)
                self._fail(lines)
            self._metrics.running.set(len(self._batch.lines))
        self._fail(set(self._listeners))

    def _notify(self, steps: Sequence[tuple[Line, str]]) -> None:
        self._metrics.passes.inc()
        self._metrics.generated_tokens.inc(len(steps))
        for line, text in steps:
            with self._changed:
                listener = self._listeners.get(line)
                if line.finished:
                    self._listeners.pop(line, None)
            if listener is not None:
                listener(text, line.finished is not None)

    def _fail(self, lines: set[Line]) -> None:
        for line in lines:
            with self._changed:
                listener = self._listeners.pop(line, None)
            if listener is not None:
                listener("", True)  # it has ended and is not finished
