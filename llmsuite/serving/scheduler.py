"""The thread that decodes: requests of all clients share one batch, which they join and leave at any pass.

Between two passes over the answers it reads at most one piece of the prompts, and makes at most one step of what else
the model is asked for. So a stream stands still for two such passes at most, however long somebody's prompt is.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from llmsuite.inference.batch import Batch, Line
from llmsuite.inference.decoder import Decoder
from llmsuite.inference.shared_prefixes import SharedPrefixes
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.turns import NOBODY, Client, Turns

Steps = Generator[None, None, Any]
"""Something that is made step by step, and returns its result."""
Listener = Callable[[str, bool], None]
"""Called in the scheduler's thread with the text that became certain, and whether the line has ended."""


class Busy(Exception):
    """As many requests wait as are allowed to."""


class BusyClient(Busy):
    """As many requests of this client wait as one client may have."""


class Paused(Exception):
    """Nothing new is begun until `Scheduler.resume`."""


class Closing(Exception):
    """The server is shutting down."""


@dataclasses.dataclass(eq=False)
class _Heard:
    """A line that somebody listens to."""

    listener: Listener
    last: float | None = None
    """When its last token came."""
    longest: float = 0.0
    """Seconds between two of its tokens, at most."""


@dataclasses.dataclass(eq=False)
class _Call:
    """Something that the model is asked for beside answers."""

    steps: Steps
    result: concurrent.futures.Future[Any]
    has_begun: bool = False


class Scheduler:
    """Decodes lines, and calls their listeners with the text. Between two passes it calls functions that use the model
    otherwise."""

    def __init__(self, decoder: Decoder, metrics: Metrics, limits: Limits, prefixes: SharedPrefixes | None = None):
        """
        Args:
            decoder: the model; only the scheduler's thread uses it from here on.
            metrics: updated at every pass.
            limits: of what is queued, of the batch, and of the pieces in which prompts are read.
            prefixes: of prompts, which are not read again; used where the decoder `shares_prefixes`.
        """
        self._decoder, self._metrics, self._limits = decoder, metrics, limits
        self._prefixes = prefixes if getattr(decoder, "shares_prefixes", False) else None
        self._batch = self._new_batch()
        self._listeners: dict[Line, _Heard] = {}
        self._waiting: Turns[Line] = Turns()
        self._cancelled: list[Line] = []
        self._calls: Turns[_Call] = Turns()
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
            waiting, calls = list(self._waiting), [call for call in self._calls if not call.has_begun]
            self._waiting.remove(waiting)
            self._calls.remove(calls)
            self._changed.notify_all()
        self._fail(waiting, Closing())
        for call in calls:
            call.result.cancel()

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

    def submit(self, lines: Sequence[Line], listeners: Sequence[Listener], client: Client = NOBODY) -> None:
        """Queue lines of a client, all of them or none. Raises Busy, Closing or Paused."""
        with self._changed:
            if self._is_closing:
                raise Closing
            if self.is_paused:
                raise Paused
            self._check_room(self._waiting, client, len(lines))
            for line, listener in zip(lines, listeners):
                self._listeners[line] = _Heard(listener)
                self._waiting.add(client, line)
            self._changed.notify_all()

    def _check_room(self, waiting: Turns[Any], client: Client, num_new: int) -> None:
        if len(waiting) + num_new > self._limits.max_waiting:
            raise Busy
        if waiting.count(client) + num_new > self._limits.share_of_client:
            raise BusyClient

    def cancel(self, lines: Sequence[Line]) -> None:
        """Stop decoding lines that no client waits for any more."""
        with self._changed:
            self._cancelled += [line for line in lines if line in self._listeners]
            self._changed.notify_all()

    def call(
        self, work: Callable[[], Any], client: Client = NOBODY, while_paused: bool = False
    ) -> concurrent.futures.Future[Any]:
        """Let the thread call a function between two passes; its result, or what it raises, is in the future.

        Args:
            work: has the model for itself while it runs.
            client: whose it is.
            while_paused: whether it is called in a pause too.

        Raises:
            Busy: too much waits.
            Closing: nothing new is begun any more.
            Paused: there is a pause.
        """

        def at_once() -> Steps:
            return work()
            yield  # there is one step

        return self.make(at_once(), client, while_paused)

    def make(self, steps: Steps, client: Client = NOBODY, while_paused: bool = False) -> concurrent.futures.Future[Any]:
        """Let the thread make the steps of something between passes, one at a time; those of several clients take
        turns. Its return value is the result; the rest as for `call`. Where the future is cancelled no further step is
        made."""
        call = _Call(steps, concurrent.futures.Future())
        with self._changed:
            if self._is_closing:
                raise Closing
            if self.is_paused and not while_paused:
                raise Paused
            self._check_room(self._calls, client, 1)
            self._calls.add(client, call)
            self._changed.notify_all()
        return call.result

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
                while not (self._stopping or self._waiting or self._cancelled or self._calls or self._open_lines):
                    self._is_resting = True
                    self._changed.notify_all()
                    self._changed.wait()
                self._is_resting = False
                if self._stopping:
                    break
                next_call = self._calls.pop() if self._calls else None
                cancelled, self._cancelled = self._cancelled, []
                if cancelled:
                    self._waiting.remove(cancelled)
                for line in cancelled:
                    self._listeners.pop(line, None)
                free = self._limits.batch_size - sum(line not in cancelled for line in self._open_lines)
                new = [self._waiting.pop()[1] for _ in range(min(free, len(self._waiting)))]
                self._metrics.waiting.set(len(self._waiting))
            if next_call is not None:
                self._step(*next_call)
            self._batch.drop(cancelled)
            self._batch.begin(new)
            self._metrics.running.set(len(self._open_lines))
            if self._batch.coming:
                self._read()
            if self._batch.lines:
                self._advance()
            self._metrics.running.set(len(self._open_lines))
        self._fail(list(self._listeners), Closing())
        for call in self._calls:
            if call.result.set_running_or_notify_cancel():
                call.result.set_exception(Closing())

    @property
    def _open_lines(self) -> list[Line]:
        """The lines that have left the queue."""
        return [*self._batch.lines, *self._batch.coming]

    def _step(self, client: Client, call: _Call) -> None:
        """Make the next step of a call, unless nobody waits any more, and queue the others."""
        if call.result.cancelled():
            return
        call.has_begun = True
        ended: Callable[[], None]
        try:
            next(call.steps)
        except StopIteration as end:
            ended = partial(call.result.set_result, end.value)
        except Exception as error:  # whatever it is, it is for the one who waits, and the server goes on
            ended = partial(call.result.set_exception, error)
        else:
            with self._changed:
                self._calls.add(client, call, is_first=True)
            return
        if call.result.set_running_or_notify_cancel():
            ended()

    def _read(self) -> None:
        """Read a piece of the prompts; those that are read to the end get their first tokens."""
        steps = self._batch.read()
        if self._prefixes is not None:
            begun = [line for line, _ in steps if line.error is None]
            self._metrics.prefix_hits.inc(sum(line.num_known > 0 for line in begun))
            self._metrics.prefix_tokens.inc(sum(line.num_known for line in begun))
            self._metrics.prefix_bytes.set(self._prefixes.num_bytes)
        self._notify(steps)

    def _advance(self) -> None:
        """Make a pass over the answers. Where it fails, all of them do."""
        try:
            steps = self._batch.advance()
        except Exception as error:  # whatever it is, the clients get an error and the server goes on
            traceback.print_exception(error)
            failed, coming, self._batch = self._batch.lines, self._batch.coming, self._new_batch()
            self._batch.begin(coming)
            self._fail(failed, error)
        else:
            self._notify(steps)

    def _new_batch(self) -> Batch:
        return Batch(self._decoder, fails_alone=True, prefixes=self._prefixes, num_tokens=self._limits.prompt_piece)

    def forget_prefixes(self) -> None:
        """The weights are others. In the scheduler's thread."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def _notify(self, steps: Sequence[tuple[Line, str]]) -> None:
        self._metrics.passes.inc()
        self._metrics.generated_tokens.inc(sum(line.error is None for line, _ in steps))
        for line, text in steps:
            if line.error is not None:
                traceback.print_exception(line.error)
                self._fail([line], line.error)
                continue
            with self._changed:
                heard = self._listeners.get(line)
                if line.finished:
                    self._listeners.pop(line, None)
            if heard is not None:
                self._measure(heard, line.finished is not None)
                heard.listener(text, line.finished is not None)

    def _measure(self, heard: _Heard, has_ended: bool) -> None:
        """Note how long a line has waited for a token."""
        now = time.monotonic()
        if heard.last is not None:
            heard.longest = max(heard.longest, now - heard.last)
            if has_ended:
                self._metrics.longest_gap.observe(heard.longest)
        heard.last = now

    def _fail(self, lines: Sequence[Line], error: Exception) -> None:
        for line in lines:
            with self._changed:
                heard = self._listeners.pop(line, None)
            if heard is not None:
                line.error = error
                heard.listener("", True)  # it has ended and is not finished
