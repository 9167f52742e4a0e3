"""Which samples make up which batch: a function of seed and position, the same for any number of ranks."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

_MOST_LISTED = 1 << 20
"""Larger permutations are not kept in memory: each number is computed where it is asked for."""
_ROUNDS = 6


class SampleOrder:
    """An endless stream of sample indices: every epoch is a fresh permutation of all samples.

    The position is the number of samples taken, so a run resumes by that number alone, on any mesh.
    """

    def __init__(self, num_samples: int, seed: int):
        assert num_samples > 0, num_samples
        self.num_samples, self.seed = num_samples, seed

    def at(self, position: int) -> int:
        """Index of the sample at a position of the stream."""
        epoch, offset = divmod(position, self.num_samples)
        if self.num_samples > _MOST_LISTED:
            return shuffled(offset, self.num_samples, f"order:{self.seed}:{epoch}")
        return int(_permutation(self.num_samples, self.seed, epoch)[offset])


def micro_batches(
    order: SampleOrder, position: int, num_steps: int, micro_batch_size: int, rank: int, num_ranks: int
) -> list[list[int]]:
    """Sample indices of each micro-batch that a data rank sees in one optimizer step.

    The global batch is the next num_steps * num_ranks * micro_batch_size samples, cut in this order, so its
    content does not depend on how it is cut.

    Args:
        order: the stream.
        position: samples taken before this step.
        num_steps: micro-batches a rank accumulates.
        micro_batch_size: samples of one micro-batch on one rank.
        rank: data rank, from 0.
        num_ranks: data ranks.
    """
    batches = []
    for step in range(num_steps):
        start = position + (step * num_ranks + rank) * micro_batch_size
        batches.append([order.at(start + i) for i in range(micro_batch_size)])
    return batches


def shuffled(number: int, size: int, name: str) -> int:
    """Where a permutation of range(size) takes a number, in constant time and memory; `name` picks the permutation.

    A Feistel network permutes the numbers of an even count of bits; it is gone through again where it leads outside.
    """
    assert 0 <= number < size, (number, size)
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys, mask = _round_keys(name), (1 << bits) - 1
    while True:
        left, right = number >> bits, number & mask
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
    """Every bit of a 64 bit word depends on all of them: the last steps of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


@functools.lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    # sorted raw words rather than Generator.permutation: NumPy promises only the raw stream never to change
    digest = hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()
    words = np.random.Philox(key=np.frombuffer(digest[:16], dtype="uint64")).random_raw(num_samples)
    return np.argsort(words, kind="stable")
