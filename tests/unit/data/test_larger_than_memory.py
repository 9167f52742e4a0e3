"""A corpus that is larger than memory: what is read of it is what is looked at, at an exact position of its order."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmsuite.data.indexed_corpus import CorpusWriter, IndexedCorpus
from llmsuite.data.loader import SampleOrder
from llmsuite.data.token_windows import TokenWindows
from tests.support.own_memory import own_memory

TOKENS = 1 << 32
LENGTH = 64
MOST = 16 << 20
"""Bytes of memory for a corpus of 8 GiB."""


def write(prefix: Path) -> Path:
    """A corpus of 4 Gi tokens that takes a few blocks of disk: all of them are 0 but the first of each GiB."""
    with CorpusWriter(prefix, "<u2") as writer:
        for _ in range(4):  # sizes are 32 bits wide
            writer.add(b"", np.array([TOKENS // 4], "<i4").tobytes())
        writer.commit()
    with open(prefix.with_suffix(".bin"), "r+b") as file:
        file.truncate(2 * TOKENS)
        for part in range(8):
            file.seek(part << 30)
            file.write(np.array([part + 1], "<u2").tobytes())
    return prefix.with_suffix(".idx")


def test_a_corpus_larger_than_memory_is_read_in_bounded_memory(tmp_path: Path) -> None:
    index = write(tmp_path / "large")
    before = own_memory()
    samples = TokenWindows(IndexedCorpus(index).tokens, LENGTH)
    order = SampleOrder(len(samples), seed=3)
    assert len(samples) == (TOKENS - 1) // LENGTH
    seen = [order.at(position) for position in range(2000)]
    total = sum(int(samples[number].sum()) for number in seen)
    total += sum(int(samples[(part << 29) // LENGTH][0]) for part in range(8))
    assert total >= sum(range(1, 9))
    assert own_memory() - before < MOST
    # a run that goes on at a position sees the same from there on, in the next epoch too
    far = len(samples) + 1000
    assert [SampleOrder(len(samples), seed=3).at(far + i) for i in range(5)] == [order.at(far + i) for i in range(5)]
    assert [SampleOrder(len(samples), seed=3).at(1000 + i) for i in range(1000)] == seen[1000:]
    assert len({*seen}) == 2000
