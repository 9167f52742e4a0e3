"""Decoding on several ranks, driven by the first one: it decides what is decoded, and the others make the same passes.

Where every rank knows what comes next, as in `generate`, all of them run the same program. A server does not know it
before a request comes: its first rank has the scheduler, and sends the others a command before each pass. Caches stay
on their ranks and have numbers; rows are removed and joined on all ranks alike.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from llmsuite.base.typing import Tensor
from llmsuite.inference.decoder import (
    Cache,
    ChunkTokens,
    Decoder,
    DecoderTraits,
    PromptDecoder,
    join_caches,
    next_chunk,
    select_rows,
)
from llmsuite.parallel import collective

_HEARTBEAT_SECONDS = 60.0
"""Interval at which idle workers get a message: without one their collective call would time out in the end."""


_END = object()


class DriverDecoder:
    """The decoder of the first rank. Not thread-safe."""

    def __init__(self, decoder: Decoder, abort: Callable[[], None] = lambda: os._exit(1)):
        """
        Args:
            decoder: of this rank.
            abort: called when a pass has failed, after the traceback is printed. The other ranks are in the middle of
                the pass and cannot receive a command, so it ends this process, and with it all of them.
        """
        self._decoder = decoder
        self._abort = abort
        self._numbers = itertools.count()
        self._commands: collections.deque[list[Any]] = collections.deque()
        """Commands that the others execute before the next pass."""
        self._lock = threading.Lock()
        self._last = time.monotonic()
        threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True).start()

    @property
    def traits(self) -> DecoderTraits:
        """Traits of any model that is cut over ranks: no prefix cache, as each rank has a part of the heads."""
        return DecoderTraits(supports_chunked_prefill=self._decoder.traits.supports_chunked_prefill)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._decoder.max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._decoder.vocab_size

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """Make one pass on all ranks, see `Decoder.forward`."""
        assert cache is None or isinstance(cache, DriverCache)
        number = next(self._numbers)
        old = None if cache is None else cache.number
        command = ["forward", number, np.asarray(ids).tolist(), np.asarray(padding).tolist(), old]
        with self._lock:
            logits, present = self._run_on_all_ranks(
                command, lambda: self._decoder.forward(ids, padding, None if cache is None else cache.own)
            )
        return logits, DriverCache(self, present, number)

    def end(self) -> None:
        """Let the workers return; no pass may follow."""
        with self._lock:
            self._broadcast(["end"])
            self._last = float("inf")

    def enqueue(self, what: str, *arguments: Any) -> int:
        """Queue a command that creates an object on the workers before the next pass; returns the object's number."""
        number = next(self._numbers)
        self._commands.append([what, number, *arguments])
        return number

    def free(self, number: int) -> None:
        """Free an object on the workers. The garbage collector calls it, in any thread."""
        self._commands.append(["forget", number])

    def _run_on_all_ranks(self, command: list[Any], work: Callable[[], Any]) -> Any:
        """Send a command to the workers, and do the same work here."""
        try:
            self._broadcast(command)
            return work()
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            self._abort()
            raise

    def _broadcast(self, command: list[Any]) -> None:
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        # one message for all queued commands: each message is a collective call that every rank takes part in
        collective.broadcast_message(json.dumps([*commands, command]).encode())
        self._last = time.monotonic()

    def _heartbeat(self) -> None:
        while self._last != float("inf"):
            time.sleep(1.0)
            with self._lock:
                if time.monotonic() - self._last > _HEARTBEAT_SECONDS:
                    self._run_on_all_ranks(["wait"], lambda: None)


class LiveDriverDecoder(DriverDecoder):
    """A `DriverDecoder` of live models, which also have log-probabilities of prompts and embeddings. All chunks of a
    text have the length of the first one, as it is sent to all ranks once."""

    _decoder: Any

    def prompt_logits(self, ids: Sequence[int], num_tokens: ChunkTokens = None) -> Iterator[np.ndarray]:
        """Yield the logits of a text chunk by chunk, see `ModelDecoder.prompt_logits`."""
        self._decoder.check_supports("echo: with logprobs")
        return self._steps("prompt_logits", list(ids), next_chunk(num_tokens))

    def embed(self, texts: Sequence[Sequence[int]], num_tokens: ChunkTokens = None) -> Iterator[np.ndarray | None]:
        """Embed texts chunk by chunk, see `ModelDecoder.embed`."""
        self._decoder.check_supports("embeddings")
        return self._steps("embed", [list(text) for text in texts], next_chunk(num_tokens))

    def _steps(self, method: str, *arguments: Any) -> Iterator[Any]:
        """The steps of a method of the decoder, each made on all ranks."""
        own = getattr(self._decoder, method)(*arguments)
        number = self.enqueue("steps", method, *arguments)
        try:
            while True:
                with self._lock:
                    result = self._run_on_all_ranks(["step", number], lambda: next(own, _END))
                if result is _END:
                    return
                yield result
        finally:
            self.free(number)


def as_driver(decoder: Decoder) -> DriverDecoder:
    """Wrap the decoder of the first rank, so that it drives the other ranks."""
    return LiveDriverDecoder(decoder) if isinstance(decoder, PromptDecoder) else DriverDecoder(decoder)


class DriverCache(Sequence[Tensor]):
    """A cache that has a shard on every rank."""

    def __init__(self, driver: DriverDecoder, own: Cache, number: int):
        self.own = own
        self.number = number
        self._driver = driver
        weakref.finalize(self, driver.free, number)

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, number: Any) -> Any:
        return self.own[number]

    def select_rows(self, rows: Sequence[int], first: int) -> DriverCache:
        """The cache of some rows, on all ranks, see `decoder.select_rows`."""
        number = self._driver.enqueue("keep", self.number, [int(row) for row in rows], int(first))
        return DriverCache(self._driver, select_rows(self.own, rows, first), number)

    def join(self, other: DriverCache) -> DriverCache:
        """Join this cache and another one on all ranks, see `decoder.join_caches`."""
        number = self._driver.enqueue("join", self.number, other.number)
        return DriverCache(self._driver, join_caches(self.own, other.own), number)


def run_worker(decoder: Any) -> None:
    """Execute the commands of the first rank until its `end`. For every other rank."""
    objects: dict[int, Any] = {}  # caches, and iterators of methods that are made in steps
    while True:
        for what, *arguments in json.loads(collective.broadcast_message(None)):
            if what == "end":
                return
            if what == "forward":
                number, ids, padding, old = arguments
                before = None if old is None else objects[old]
                objects[number] = decoder.forward(np.asarray(ids, "int64"), np.asarray(padding, "int64"), before)[1]
            elif what == "keep":
                number, old, rows, first = arguments
                objects[number] = select_rows(objects[old], rows, first)
            elif what == "join":
                number, one, other = arguments
                objects[number] = join_caches(objects[one], objects[other])
            elif what == "forget":
                del objects[arguments[0]]
            elif what == "steps":
                number, name, *given = arguments
                objects[number] = getattr(decoder, name)(*given)
            elif what == "step":
                next(objects[arguments[0]], None)
            else:
                assert what == "wait", what
