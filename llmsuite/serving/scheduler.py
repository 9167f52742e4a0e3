"""The thread that decodes: requests of all clients share one batch, which they join and leave at any pass.

Between two passes over the answers it reads at most one chunk of the prompts, and makes at most one step of other work
with the model, such as embeddings. So a stream waits for two such passes at most, however long a prompt is, and each of
them is so short that it takes as long as a few passes over the answers; see `ChunkBudget`.
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

from llmsuite.inference.batch import Batch, BatchSequence, DecodingSequence
from llmsuite.inference.decoder import Decoder
from llmsuite.inference.prefix_cache import PrefixCache
from llmsuite.serving.chunk_budget import ChunkBudget
from llmsuite.serving.fair_queue import NOBODY, Client, FairQueue
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics

Steps = Generator[None, None, Any]
"""Work that is done step by step, and returns its result."""
Listener = Callable[[str, bool], None]
"""Called in the scheduler's thread with the text that became certain, and True once the sequence has ended."""


class Busy(Exception):
    """The queue is full."""


class BusyClient(Busy):
    """The client has as many requests in the queue as one client may have."""


class Paused(Exception):
    """New requests are not accepted before `Scheduler.resume`."""


class Closing(Exception):
    """The server is shutting down."""


@dataclasses.dataclass(eq=False)
class _OpenStream:
    """The listener of a sequence."""

    listener: Listener
    last_token_time: float | None = None
    longest_gap: float = 0.0
    """Seconds between two of its tokens, at most."""


@dataclasses.dataclass(eq=False)
class _Task:
    """Work with the model other than decoding."""

    steps: Steps
    result: concurrent.futures.Future[Any]
    has_started: bool = False


class Scheduler:
    """Decodes sequences, and calls their listeners with the text. Between two passes it runs other work with the
    model."""

    def __init__(
        self,
        decoder: Decoder,
        metrics: Metrics,
        limits: Limits,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            decoder: the model; from here on only the scheduler's thread uses it.
            metrics: updated at every pass.
            limits: of the queue, of the batch, and of the chunks in which prompts are read.
            prefix_cache: keys and values of earlier prompts; used where the decoder `supports_prefix_cache`.
            clock: gives seconds, by which chunks are made as long as a few passes.
        """
        self._decoder = decoder
        self._metrics = metrics
        self._limits = limits
        self._prefix_cache = prefix_cache if decoder.traits.supports_prefix_cache else None
        self._batch = self._new_batch()
        self._clock = clock
        self._chunk = ChunkBudget(limits.prompt_piece)
        self._step_tokens: int | None = None
        """Last result of `next_chunk_tokens` in the current step."""
        self._streams: dict[BatchSequence, _OpenStream] = {}
        self._waiting: FairQueue[DecodingSequence] = FairQueue()
        self._cancelled: list[DecodingSequence] = []
        self._tasks: FairQueue[_Task] = FairQueue()
        self._changed = threading.Condition()
        self.is_paused = False
        self._is_idle = False
        """True while the thread waits for work."""
        self._is_closing = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Start nothing new: queued requests fail with `Closing`, and started ones continue."""
        with self._changed:
            self._is_closing = True
            waiting = list(self._waiting)
            tasks = [task for task in self._tasks if not task.has_started]
            self._waiting.remove(waiting)
            self._tasks.remove(tasks)
            self._changed.notify_all()
        self._fail(waiting, Closing())
        for task in tasks:
            task.result.cancel()

    def stop(self) -> None:
        """End the thread after its current pass; open sequences fail with `Closing`."""
        self.close()
        self.stop_soon()
        self._thread.join()

    def stop_soon(self) -> None:
        """Let the thread end after its current pass, without waiting for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def submit(
        self, sequences: Sequence[DecodingSequence], listeners: Sequence[Listener], client: Client = NOBODY
    ) -> None:
        """Queue sequences of a client, all of them or none. Raises Busy, Closing or Paused."""
        with self._changed:
            if self._is_closing:
                raise Closing
            if self.is_paused:
                raise Paused
            self._check_queue_limits(self._waiting, client, len(sequences))
            for sequence, listener in zip(sequences, listeners):
                self._streams[sequence] = _OpenStream(listener)
                self._waiting.add(client, sequence)
            self._changed.notify_all()

    def _check_queue_limits(self, waiting: FairQueue[Any], client: Client, num_new: int) -> None:
        if len(waiting) + num_new > self._limits.max_waiting:
            raise Busy
        if waiting.count(client) + num_new > self._limits.share_of_client:
            raise BusyClient

    def cancel(self, sequences: Sequence[DecodingSequence]) -> None:
        """Stop decoding sequences that no client waits for any more."""
        with self._changed:
            self._cancelled += [sequence for sequence in sequences if sequence in self._streams]
            self._changed.notify_all()

    def submit_call(
        self, work: Callable[[], Any], client: Client = NOBODY, while_paused: bool = False
    ) -> concurrent.futures.Future[Any]:
        """Queue a function that the thread calls between two passes; the future gets its result or its exception.

        Args:
            work: has exclusive use of the model while it runs.
            client: who has requested it.
            while_paused: accept it in a pause too.

        Raises:
            Busy: the queue is full.
            Closing: the server is shutting down.
            Paused: there is a pause.
        """

        def single_step() -> Steps:
            return work()
            yield  # makes it a generator, of one step

        return self.submit_steps(single_step(), client, while_paused)

    def next_chunk_tokens(self) -> int:
        """Return the most tokens of the chunk of a text that a step of `submit_steps` reads now. Steps call it."""
        self._step_tokens = self._chunk.tokens(is_limited=bool(self._batch.sequences))
        return self._step_tokens

    def submit_steps(
        self, steps: Steps, client: Client = NOBODY, while_paused: bool = False
    ) -> concurrent.futures.Future[Any]:
        """Queue work in steps, of which the thread makes one between two passes; clients take turns. When the future is
        cancelled, no more steps are made. Raises as `submit_call` does.

        Args:
            steps: a generator; the future gets its return value.
            client: who has requested it.
            while_paused: accept it in a pause too.
        """
        task = _Task(steps, concurrent.futures.Future())
        with self._changed:
            if self._is_closing:
                raise Closing
            if self.is_paused and not while_paused:
                raise Paused
            self._check_queue_limits(self._tasks, client, 1)
            self._tasks.add(client, task)
            self._changed.notify_all()
        return task.result

    def pause(self, timeout: float) -> bool:
        """Accept nothing new, and wait until all started work has ended.

        Args:
            timeout: seconds to wait.

        Returns:
            True if it has ended.
        """
        with self._changed:
            self.is_paused = True
            return self._changed.wait_for(lambda: self._is_idle and not (self._waiting or self._tasks), timeout)

    def resume(self) -> None:
        """Accept new sequences and work again."""
        with self._changed:
            self.is_paused = False

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or self._cancelled or self._tasks or self._open_sequences):
                    self._is_idle = True
                    self._changed.notify_all()
                    self._changed.wait()
                self._is_idle = False
                if self._stopping:
                    break
                next_task = self._tasks.pop() if self._tasks else None
                cancelled = self._cancelled
                self._cancelled = []
                if cancelled:
                    self._waiting.remove(cancelled)
                for sequence in cancelled:
                    self._streams.pop(sequence, None)
                free = self._limits.batch_size - sum(sequence not in cancelled for sequence in self._open_sequences)
                new = [self._waiting.pop()[1] for _ in range(min(free, len(self._waiting)))]
                self._metrics.waiting.set(len(self._waiting))
            if next_task is not None:
                self._step(*next_task)
            try:
                self._batch.remove(cancelled)
                self._batch.add(new)
                self._metrics.running.set(len(self._open_sequences))
                if self._batch.prefilling:
                    self._prefill()
                if self._batch.sequences:
                    self._advance()
            except (
                Exception
            ) as error:  # such as no memory to join two caches: the thread may not end, as all wait for it
                traceback.print_exception(error)
                self._drop_batch(error)
            self._metrics.running.set(len(self._open_sequences))
        self._fail(list(self._streams), Closing())
        for task in self._tasks:
            if task.result.set_running_or_notify_cancel():
                task.result.set_exception(Closing())

    @property
    def _open_sequences(self) -> list[BatchSequence]:
        """The sequences that have left the queue."""
        return [*self._batch.sequences, *self._batch.prefilling]

    def _step(self, client: Client, task: _Task) -> None:
        """Make the next step of a task, unless it was cancelled, and queue the rest."""
        if task.result.cancelled():
            return
        task.has_started = True
        ended: Callable[[], None]
        self._step_tokens = None
        start = self._clock()
        try:
            next(task.steps)
        except StopIteration as end:
            ended = partial(task.result.set_result, end.value)
        except Exception as error:  # any error belongs to the client that waits, and the server continues
            ended = partial(task.result.set_exception, error)
        else:
            if self._step_tokens is not None and self._batch.sequences:
                self._chunk.record_chunk(self._step_tokens, self._clock() - start, is_full=True)
            with self._changed:
                self._tasks.add(client, task, is_first=True)
            return
        if task.result.set_running_or_notify_cancel():
            ended()

    def _prefill(self) -> None:
        """Read a chunk of the prompts; sequences whose prompts are read to the end get their first tokens."""
        is_decoding = bool(self._batch.sequences)
        num_tokens = self._chunk.tokens(is_decoding)
        start = self._clock()
        steps = self._batch.prefill(num_tokens)
        if is_decoding:
            self._chunk.record_chunk(num_tokens, self._clock() - start, is_full=not steps)
        if self._prefix_cache is not None:
            started = [sequence for sequence, _ in steps if sequence.error is None]
            self._metrics.prefix_hits.inc(sum(sequence.num_cached_tokens > 0 for sequence in started))
            self._metrics.prefix_tokens.inc(sum(sequence.num_cached_tokens for sequence in started))
            self._metrics.prefix_bytes.set(self._prefix_cache.num_bytes)
        self._notify(steps)

    def _advance(self) -> None:
        """Make a pass over the answers. Where it fails, all of them fail."""
        start = self._clock()
        try:
            steps = self._batch.advance()
        except Exception as error:  # the clients get an error of any kind, and the server continues
            traceback.print_exception(error)
            failed = self._batch.sequences
            prefilling = self._batch.prefilling
            self._batch = self._new_batch()
            self._batch.add(prefilling)
            self._fail(failed, error)
        else:
            self._chunk.record_pass(self._clock() - start)
            self._notify(steps)

    def _drop_batch(self, error: Exception) -> None:
        """Fail every sequence that has left the queue, and go on with an empty batch."""
        self._batch = self._new_batch()
        with self._changed:
            waiting = set(self._waiting)
            started = [sequence for sequence in self._streams if sequence not in waiting]
        self._fail(started, error)

    def _new_batch(self) -> Batch:
        return Batch(
            self._decoder,
            isolates_failures=True,
            prefix_cache=self._prefix_cache,
            chunk_size=self._limits.prompt_piece,
        )

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache, because the weights have changed. Call it in the scheduler's thread."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()

    def _notify(self, steps: Sequence[tuple[BatchSequence, str]]) -> None:
        self._metrics.passes.inc()
        self._metrics.generated_tokens.inc(sum(sequence.error is None for sequence, _ in steps))
        for sequence, text in steps:
            if sequence.error is not None:
                traceback.print_exception(sequence.error)
                self._fail([sequence], sequence.error)
                continue
            has_ended = sequence.finish_reason is not None
            with self._changed:
                stream = self._streams.get(sequence)
                if has_ended:
                    self._streams.pop(sequence, None)
            if stream is not None:
                self._measure(stream, has_ended)
                stream.listener(text, has_ended)

    def _measure(self, stream: _OpenStream, has_ended: bool) -> None:
        """Record how long a sequence has waited for a token."""
        now = time.monotonic()
        if stream.last_token_time is not None:
            stream.longest_gap = max(stream.longest_gap, now - stream.last_token_time)
            if has_ended:
                self._metrics.longest_gap.observe(stream.longest_gap)
        stream.last_token_time = now

    def _fail(self, sequences: Sequence[BatchSequence], error: Exception) -> None:
        for sequence in sequences:
            with self._changed:
                stream = self._streams.pop(sequence, None)
            if stream is not None:
                sequence.error = error
                stream.listener("", True)  # it has ended without a finish reason
