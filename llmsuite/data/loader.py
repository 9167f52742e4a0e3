"""Order of samples, global batches and micro-batches, and threads that prefetch them.

The samples of a batch are a function of seed and position alone, the same for any number of ranks.
"""

from __future__ import annotations

import bisect
import collections
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError

_MAX_LISTED = 1 << 20
"""Largest permutation that is kept in memory. The numbers of larger ones are computed on demand."""
_ROUNDS = 6
"""Rounds of the Feistel network."""


class SampleOrder:
    """An endless stream of sample indices: every epoch is a new permutation of all samples, or their own order.

    The position is the number of consumed samples, so a run resumes from that number alone, on any mesh.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True, multiple: int = 1):
        """
        Args:
            num_samples: of an epoch, before the last ones are dropped.
            seed: of the permutations.
            shuffle: False to keep the order of the samples.
            multiple: drop the last samples of each epoch that do not fill this many; at most `num_samples`.
        """
        assert 0 < multiple <= num_samples, (multiple, num_samples)
        self.num_samples = num_samples
        self.seed = seed
        self._shuffle = shuffle
        self.epoch_length = num_samples // multiple * multiple
        """Samples of an epoch."""

    def at(self, position: int) -> int:
        """Return the index of the sample at a position of the stream."""
        return self._sample(*divmod(position, self.epoch_length))

    def first(self, count: int) -> Iterator[int]:
        """Yield the index of each sample that the first `count` positions may have, once."""
        limit = min(count, self.epoch_length)
        if count > self.epoch_length and self._shuffle:
            limit = self.num_samples  # samples that one epoch drops come in others, which have another order
        return (self._sample(0, at) for at in range(limit))

    def _sample(self, epoch: int, offset: int) -> int:
        """Return the index at an offset of an epoch's order of all samples, the dropped ones too."""
        if not self._shuffle:
            return offset
        if self.num_samples > _MAX_LISTED:
            return feistel_permute(offset, self.num_samples, f"order:{self.seed}:{epoch}")
        return int(_permutation(self.num_samples, self.seed, epoch)[offset])


class BatchSampler:
    """Splits global batches into micro-batches and assigns them to data ranks.

    A global batch is the next samples of the stream, sorted by length if lengths are given, the longest first: this
    order does not depend on ranks. It is split into micro-batches, which go to the ranks in turn. Every rank gets the
    same number: pipelines need that, and so do the collectives that gather parameters for each micro-batch.
    """

    def __init__(
        self,
        order: SampleOrder,
        global_batch_size: int,
        micro_batch_size: int,
        num_ranks: int,
        lengths: np.ndarray | None = None,
        max_tokens: int | None = None,
        length_multiple: int = 1,
    ):
        """
        Args:
            order: the stream.
            global_batch_size: samples of a step, a multiple of the ranks; without `max_tokens` also of
                micro_batch_size x ranks.
            micro_batch_size: samples of a micro-batch.
            num_ranks: data ranks.
            lengths: [samples, rows of each], int64: the tokens of the rows that a sample takes in a batch; None to
                keep the order of the stream.
            max_tokens: limit on the tokens of a micro-batch, padding included; replaces micro_batch_size.
            length_multiple: rows are padded to a multiple of this.

        Raises:
            UserError: a sample alone has more tokens than `max_tokens`.
        """
        self._order = order
        self._num_ranks = num_ranks
        self.global_batch_size = global_batch_size
        self._size = micro_batch_size
        self._max_tokens = max_tokens
        self._longest = None if lengths is None else lengths.max(1)
        if max_tokens is not None:
            assert lengths is not None, "micro-batches by tokens need lengths"
            assert self._longest is not None
            self._rows = lengths.shape[1]
            self._multiple = length_multiple
            most = int(self._tokens(self._longest).max())
            if most > max_tokens:
                raise UserError(
                    f"train.micro_batch_tokens: is {max_tokens}, and the longest sample takes {most} with its padding; "
                    "set it to that or more, or lower data.max_length"
                )

    def _tokens(self, longest: np.ndarray) -> np.ndarray:
        """Return the tokens of samples with padding: every row has the longest length, rounded up to the multiple."""
        return -(-longest // self._multiple) * self._multiple * self._rows

    def micro_batches(self, position: int, rank: int) -> list[list[int]]:
        """Return the sample indices of each micro-batch of a data rank in one optimizer step.

        Args:
            position: samples consumed before this step.
            rank: data rank, from 0.
        """
        if self._longest is None:
            per_turn = self._num_ranks * self._size
            starts = range(position + rank * self._size, position + self.global_batch_size, per_turn)
            return [list(map(self._order.at, range(start, start + self._size))) for start in starts]
        samples = np.array([self._order.at(position + i) for i in range(self.global_batch_size)])
        samples = samples[np.argsort(-self._longest[samples], kind="stable")]
        batch = samples.tolist()
        if self._max_tokens is None:
            bounds = list(range(0, len(batch) + 1, self._size))
        else:
            bounds = _cut(self._tokens(self._longest[samples]).tolist(), self._max_tokens, self._num_ranks)
        return [batch[a:b] for a, b in itertools.pairwise(bounds)][rank :: self._num_ranks]


def _cut(widths: Sequence[int], max_tokens: int, num_ranks: int) -> list[int]:
    """Return the indices where micro-batches begin, and the end of the last one.

    There are as few as possible, a multiple of the ranks, and the largest of them is as small as possible.

    Args:
        widths: tokens of the samples, descending: a micro-batch has the width of its first sample for each of them.
        max_tokens: of a micro-batch.
        num_ranks: data ranks; their number divides that of the samples.
    """

    def greedy(limit: int) -> list[int]:
        bounds = [0]
        while bounds[-1] < len(widths):
            bounds.append(min(len(widths), bounds[-1] + limit // widths[bounds[-1]]))
        return bounds

    count = -(-(len(greedy(max_tokens)) - 1) // num_ranks) * num_ranks
    # a larger limit never takes more micro-batches
    limits = range(widths[0], max_tokens + 1)
    best = limits[bisect.bisect_left(limits, True, key=lambda limit: len(greedy(limit)) - 1 <= count)]
    bounds = greedy(best)
    while len(bounds) - 1 < count:
        sizes = [((b - a) * widths[a] if b - a > 1 else 0, -a) for a, b in itertools.pairwise(bounds)]
        _, negated = max(sizes)
        at = bounds.index(-negated)
        bounds.insert(at + 1, (bounds[at] + bounds[at + 1] + 1) // 2)
    return bounds


class Prefetcher(Iterator[list[Any]]):
    """Iterator over the micro-batches of each step: lists of samples, or with workers batches that threads collate.

    A context manager: its threads end with it, also after an error.
    """

    def __init__(
        self,
        samples: Sequence[Any],
        steps: Iterator[list[list[int]]],
        collate: Callable[[Sequence[Any]], Any],
        num_workers: int,
    ):
        """
        Args:
            samples: read by index, in the threads if there are any.
            steps: sample indices of each micro-batch of each step.
            collate: makes a batch of samples.
            num_workers: threads; at most two micro-batches for each thread are prefetched after the next step.
        """
        self._samples = samples
        self._steps = steps
        self._collate = collate
        self._num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, "reader") if num_workers else None
        self._in_flight: collections.deque[list[Future[Any]]] = collections.deque()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads; they finish the batches that they have begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __next__(self) -> list[Any]:
        """Return the micro-batches of the next step. An error in a thread is raised by `Future.result`."""
        if self._pool is None:
            return [self._read(picked) for picked in next(self._steps)]
        while not self._in_flight or sum(map(len, self._in_flight)) - len(self._in_flight[0]) < 2 * self._num_workers:
            step = next(self._steps, None)
            if step is None:
                break
            self._in_flight.append([self._pool.submit(self._make, picked) for picked in step])
        if not self._in_flight:
            raise StopIteration
        return self._in_flight.popleft()

    def _read(self, picked: Sequence[int]) -> list[Any]:
        return [self._samples[i] for i in picked]

    def _make(self, picked: Sequence[int]) -> Any:
        return self._collate(self._read(picked))


def feistel_permute(number: int, size: int, name: str) -> int:
    """Return the image of a number under a permutation of range(size), in constant time and memory.

    A Feistel network permutes the numbers of an even count of bits; it is repeated while the result is out of range
    (cycle walking: Black, Rogaway 2002).

    Args:
        number: from 0 to size - 1.
        size: of the range.
        name: selects the permutation.
    """
    assert 0 <= number < size, (number, size)
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(name)
    mask = (1 << bits) - 1
    while True:
        left = number >> bits
        right = number & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        number = left << bits | right
        if number < size:
            return number


@functools.lru_cache(maxsize=4)
def _round_keys(name: str) -> list[int]:
    digest = hashlib.sha512(name.encode()).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def _mixed(word: int) -> int:
    """Mix a 64 bit word so that every bit depends on all bits of the input: the last steps of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


@functools.lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    # sorted raw words rather than Generator.permutation: NumPy promises only the raw stream never to change
    digest = hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()
    words = np.random.Philox(key=np.frombuffer(digest[:16], dtype="uint64")).random_raw(num_samples)
    return np.argsort(words, kind="stable")
