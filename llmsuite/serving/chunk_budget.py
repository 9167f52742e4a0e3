"""The length of a chunk: it is read between two decoding passes, and takes as long as a few of them.

How many tokens that are depends on model, processor and batch: a pass over few answers is bound by memory, a chunk by
arithmetic. So both are measured while the server runs.
"""

from __future__ import annotations

import collections
import statistics

CHUNK_PASSES = 3
"""Decoding passes that a chunk is meant to last. Between two passes there are two chunks at most, one of a prompt and
one of other work, so a stream waits for about six."""
IMPERCEPTIBLE = 0.03
"""Seconds that a chunk may last in any case. Nobody notices that a stream waits for so long, and the passes of a tiny
model are so short that chunks of a few of them would read a long prompt six times slower."""
SMALLEST = 4
"""Tokens of a chunk at least, at the beginning of a prompt: the call itself takes as long as a few tokens."""
_NUM_PASSES = 9
"""Decoding passes whose median is the time of one: one of them may have waited for the processor."""
_GROWTH = 2.0
"""Times that a chunk may be as long as the one before."""


class ChunkBudget:
    """Tokens of the next chunk, as at the beginning of a prompt; see `chunk_length` for later positions.

    It begins with `SMALLEST` and grows to what lasts `CHUNK_PASSES` decoding passes, or `IMPERCEPTIBLE`. While nobody
    decodes nobody waits, and chunks are as large as they may be.
    """

    def __init__(self, largest: int):
        """
        Args:
            largest: most tokens of a chunk.
        """
        self._largest = largest
        self._tokens = float(min(SMALLEST, largest))
        self._passes: collections.deque[float] = collections.deque(maxlen=_NUM_PASSES)

    def tokens(self, is_limited: bool) -> int:
        """Most tokens of the next chunk; `is_limited`: somebody's decoding waits for it."""
        return int(self._tokens) if is_limited else self._largest

    def record_pass(self, seconds: float) -> None:
        """Record how long a decoding pass has taken."""
        self._passes.append(seconds)

    def record_chunk(self, tokens: int, seconds: float, is_full: bool) -> None:
        """Record how long a chunk has taken, while somebody decoded.

        Args:
            tokens: most tokens that it was allowed.
            seconds: it took.
            is_full: it had as many. If the text ended before, it says nothing about longer ones.
        """
        if not self._passes:
            return
        most = max(CHUNK_PASSES * statistics.median(self._passes), IMPERCEPTIBLE)
        if seconds <= most and not is_full:
            return
        wanted = tokens * most / max(seconds, 1e-9)
        self._tokens = max(min(wanted, _GROWTH * self._tokens, self._largest), min(SMALLEST, self._largest))
