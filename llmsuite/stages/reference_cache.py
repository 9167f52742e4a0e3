"""Log-probabilities of the reference model, computed once per answer and cached on disk for later runs.

The key of an entry covers everything it depends on: the content of the weights, the shape, the precision, and the
tokens of prompt and answer. The tokens depend on tokenizer, chat template and row, so an entry cannot be stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from llmsuite.base.cache import cache_root
from llmsuite.base.errors import UserError
from llmsuite.parallel import collective

_TABLE = "logps64"
"""An older table, `logps`, has values that were rounded to float32."""
_QUERY_SIZE = 500
"""Keys in a query; builds of SQLite may allow no more than 999 parameters."""


def answer_key(prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Key of an answer to a prompt, both as token ids."""
    digest = hashlib.sha256()
    for part in (prompt, answer):
        ids = np.asarray(part, dtype="<i8")
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()


class LogpStore(Protocol):
    """Log-probabilities by key."""

    def lookup(self, keys: Iterable[str]) -> dict[str, float]:
        """The entries of those keys that are stored."""

    def store(self, entries: Mapping[str, float]) -> None:
        """Add entries."""


class NoCache:
    """A `LogpStore` that stores nothing."""

    def lookup(self, keys: Iterable[str]) -> dict[str, float]:
        """No entry."""
        return {}

    def store(self, entries: Mapping[str, float]) -> None:
        """Do nothing."""


class ReferenceCache:
    """Log-probabilities by answer for one reference model. Several runs may use it concurrently."""

    def __init__(self, model_digest: str, root: Path | None = None):
        directory = (root or cache_root()) / "reference-logps"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}; set LLMSUITE_CACHE to a directory to write in") from error
        self.path = directory / f"{model_digest}.sqlite"

    def lookup(self, keys: Iterable[str]) -> dict[str, float]:
        """The entries of those keys that are in the cache."""
        queries = list(keys)
        found = dict[str, float]()
        with self._connect() as db:
            for first in range(0, len(queries), _QUERY_SIZE):
                some = queries[first : first + _QUERY_SIZE]
                placeholders = ", ".join("?" * len(some))
                found.update(db.execute(f"SELECT key, logp FROM {_TABLE} WHERE key IN ({placeholders})", some))
        return found

    def store(self, entries: Mapping[str, float]) -> None:
        """Add entries in one transaction."""
        with self._connect() as db:
            db.executemany(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?)", entries.items())

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as db, db:
                columns = "key TEXT PRIMARY KEY, logp REAL NOT NULL"
                db.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE} ({columns}) WITHOUT ROWID")
                yield db
        except sqlite3.DatabaseError as error:
            raise UserError(f"{self.path}: {error}; it is only a cache, delete it and run again") from error


def complete(
    cache: LogpStore, keys: Sequence[str], compute: Callable[[list[list[int]], int], Mapping[str, float]]
) -> tuple[dict[str, float], int]:
    """Look up every key, and compute the missing ones, a part on each rank. A collective call: every data-loading rank
    has to make it.

    Args:
        cache: for the lookup, and to store new values.
        keys: of all entries, the same on all ranks.
        compute: gets for each data rank the indices of the keys it has to compute, and the data rank of this process.
            Returns the values of its part by key, and may return more. It has to make equally many forward passes on
            every data rank, as sharding stage 3 gathers the parameters for each.

    Returns:
        The value of every key, and the number of computed ones.

    Raises:
        UserError: a value is not finite. Then nothing is stored.
    """
    mesh = collective.mesh()
    rank = mesh.data_rank
    num_ranks = mesh.degrees.num_data_ranks
    known = cache.lookup(keys)
    # ranks may see different states of a cache that another run is writing: an entry counts only if all ranks have it
    *counts, num_ranks_reading = collective.sum_over_loader_ranks([*(float(key in known) for key in keys), 1.0])
    missing = [i for i, count in enumerate(counts) if count < num_ranks_reading]
    if missing:
        # contiguous parts keep the two answers of a pair, which are neighbours, together
        bounds = [len(missing) * at // num_ranks for at in range(num_ranks + 1)]
        part = range(bounds[rank], bounds[rank + 1])
        mine = compute([missing[first:last] for first, last in itertools.pairwise(bounds)], rank)
        # each rank adds only its own part: other values that `compute` returned are those of another rank
        own_values = [mine[keys[i]] if at in part else 0.0 for at, i in enumerate(missing)]
        values = collective.sum_over_data(own_values)
        if not all(map(math.isfinite, values)):
            raise UserError(
                "the initial model computes a log-probability of an answer that is infinite or not a number; "
                "look for a fault in its weights"
            )
        computed = {keys[i]: value for i, value in zip(missing, values)}
        if collective.rank() == 0:
            cache.store(computed)
        known.update(computed)
    return {key: known[key] for key in keys}, len(missing)
