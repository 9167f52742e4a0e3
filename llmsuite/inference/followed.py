"""A decoder of several ranks that one of them leads: it decides what is decoded, and the others make the same passes.

Where every rank knows what comes next, as in `generate`, all of them run the same program. A server does not know it
before a request comes: its first rank has the scheduler, and tells the others before each pass. Caches stay on their
ranks and have numbers; rows are dropped and joined everywhere alike.
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

from llmsuite.inference.decoder import Cache, Decoder, join, keep_rows
from llmsuite.parallel import collective
from llmsuite.typing import Tensor

_BEAT_SECONDS = 60.0
"""How often the others are told that nothing is to be done: they would give up waiting in the end."""


_END = object()


class Leader:
    """The decoder of the first rank. Not for several threads."""

    shares_prefixes = False

    def __init__(self, decoder: Decoder, fail: Callable[[], None] = lambda: os._exit(1)):
        """
        Args:
            decoder: of this rank.
            fail: called when a pass has failed, behind the trace; the others are in the middle of it, and cannot be
                told. It ends this process, and so all of them.
        """
        self._decoder, self._fail = decoder, fail
        self._numbers = itertools.count()
        self._orders: collections.deque[list[Any]] = collections.deque()
        """What the others do before the next pass."""
        self._lock = threading.Lock()
        self._last = time.monotonic()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @property
    def reads_in_pieces(self) -> bool:
        """See `ModelDecoder`."""
        return getattr(self._decoder, "reads_in_pieces", True)

    @property
    def max_length(self) -> int:
        """See `Decoder`."""
        return self._decoder.max_length

    @property
    def vocab_size(self) -> int:
        """See `Decoder`."""
        return self._decoder.vocab_size

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """See `Decoder`."""
        assert cache is None or isinstance(cache, LedCache)
        number = next(self._numbers)
        old = None if cache is None else cache.number
        order = ["forward", number, np.asarray(ids).tolist(), np.asarray(padding).tolist(), old]
        with self._lock:
            logits, present = self._lead(
                order, lambda: self._decoder.forward(ids, padding, None if cache is None else cache.own)
            )
        return logits, LedCache(self, present, number)

    def end(self) -> None:
        """Let the others go; nothing may be asked afterwards."""
        with self._lock:
            self._tell(["end"])
            self._last = float("inf")

    def note(self, what: str, *words: Any) -> int:
        """Have something made before the next pass, such as a cache of others; returns its number."""
        number = next(self._numbers)
        self._orders.append([what, number, *words])
        return number

    def forget(self, number: int) -> None:
        """Nobody has this any more. Called by the garbage collector, in any thread."""
        self._orders.append(["forget", number])

    def _lead(self, order: list[Any], work: Callable[[], Any]) -> Any:
        """Tell the others to do something, and do it."""
        try:
            self._tell(order)
            return work()
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            self._fail()
            raise

    def _tell(self, order: list[Any]) -> None:
        orders = []
        while self._orders:
            orders.append(self._orders.popleft())
        collective.message_of_first_rank(json.dumps([*orders, order]).encode())
        self._last = time.monotonic()

    def _beat(self) -> None:
        while self._last != float("inf"):
            time.sleep(1.0)
            with self._lock:
                if time.monotonic() - self._last > _BEAT_SECONDS:
                    self._lead(["wait"], lambda: None)


class LiveLeader(Leader):
    """The same of a live model, which gives more than answers."""

    _decoder: Any

    def prompt_logits(self, ids: Sequence[int], num_tokens: int | None = None) -> Iterator[np.ndarray]:
        """See `ModelDecoder.prompt_logits`."""
        self._decoder.check_plain("echo: with logprobs")
        return self._steps("prompt_logits", list(ids), num_tokens)

    def embed(self, texts: Sequence[Sequence[int]], num_tokens: int | None = None) -> Iterator[np.ndarray | None]:
        """See `ModelDecoder.embed`."""
        self._decoder.check_plain("embeddings")
        return self._steps("embed", [list(text) for text in texts], num_tokens)

    def _steps(self, what: str, *words: Any) -> Iterator[Any]:
        """The steps of a method of the decoder, each of which the others make too."""
        own = getattr(self._decoder, what)(*words)
        number = self.note("steps", what, *words)
        try:
            while True:
                with self._lock:
                    made = self._lead(["step", number], lambda: next(own, _END))
                if made is _END:
                    return
                yield made
        finally:
            self.forget(number)


def lead(decoder: Decoder) -> Leader:
    """The decoder of the first rank as one that leads the others."""
    return LiveLeader(decoder) if hasattr(decoder, "prompt_logits") else Leader(decoder)


class LedCache(Sequence[Tensor]):
    """A cache of which every rank has a part."""

    def __init__(self, leader: Leader, own: Cache, number: int):
        self.own, self.number, self._leader = own, number, leader
        weakref.finalize(self, leader.forget, number)

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, number: Any) -> Any:
        return self.own[number]

    def keep_rows(self, rows: Sequence[int], first_column: int) -> LedCache:
        """See `decoder.keep_rows`."""
        number = self._leader.note("keep", self.number, [int(row) for row in rows], int(first_column))
        return LedCache(self._leader, keep_rows(self.own, rows, first_column), number)

    def join(self, other: LedCache) -> LedCache:
        """See `decoder.join`."""
        number = self._leader.note("join", self.number, other.number)
        return LedCache(self._leader, join(self.own, other.own), number)


def follow(decoder: Any) -> None:
    """Do what the first rank says, until it says that it is the end. For every other rank."""
    held: dict[int, Any] = {}  # caches, and methods that are made in steps
    while True:
        for what, *words in json.loads(collective.message_of_first_rank(None)):
            if what == "end":
                return
            if what == "forward":
                number, ids, padding, old = words
                before = None if old is None else held[old]
                held[number] = decoder.forward(np.asarray(ids, "int64"), np.asarray(padding, "int64"), before)[1]
            elif what == "keep":
                number, old, rows, first_column = words
                held[number] = keep_rows(held[old], rows, first_column)
            elif what == "join":
                number, first, second = words
                held[number] = join(held[first], held[second])
            elif what == "forget":
                del held[words[0]]
            elif what == "steps":
                number, name, *given = words
                held[number] = getattr(decoder, name)(*given)
            elif what == "step":
                next(held[words[0]], None)
            else:
                assert what == "wait", what
