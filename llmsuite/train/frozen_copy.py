"""The initial weights of a run beside those that are trained, for a loss that compares with them.

The copy is sharded as the weights are, and takes their place while a pre-pass runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from llmsuite.parallel.sharding import ParameterShard


class FrozenCopy:
    """A copy of what this rank holds of each parameter."""

    def __init__(self, shards: Sequence[ParameterShard]):
        """Made while the initial weights are in place."""
        self._kept = [(shard, shard.copy_of_stored()) for shard in shards]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While active, on every rank, passes are those of the initial model."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for shard, kept in self._kept:
            shard.swap_stored(kept)
