"""Log-probabilities of the reference model, computed once per answer and kept on disk for every later run.

An entry is named by everything it depends on: the content of the weights, the shape, the precision, the tokens of the
prompt and of the answer. The tokens cover tokenizer, chat template and row, so an entry cannot be stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmsuite.cache import cache_root
from llmsuite.errors import UserError
from llmsuite.parallel import collective

_TABLE = "logps64"
"""The first table, `logps`, has values that were rounded to float32."""
_MOST_ASKED = 500
"""Keys in a query; SQLite may be built to take no more than 999."""


def answer_key(prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Name of an answer to a prompt, both as token ids."""
    digest = hashlib.sha256()
    for part in (prompt, answer):
        ids = np.asarray(part, dtype="<i8")
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()


class ReferenceCache:
    """Log-probabilities by answer, for one reference model. Safe for several runs at a time."""

    def __init__(self, model_digest: str, root: Path | None = None):
        directory = (root or cache_root()) / "reference-logps"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}; set LLMSUITE_CACHE to a directory to write in") from error
        self.path = directory / f"{model_digest}.sqlite"

    def lookup(self, keys: Iterable[str]) -> dict[str, float]:
        """The entries that are there."""
        wanted, found = list(keys), dict[str, float]()
        with self._connect() as db:
            for first in range(0, len(wanted), _MOST_ASKED):
                some = wanted[first : first + _MOST_ASKED]
                marks = ", ".join("?" * len(some))
                found.update(db.execute(f"SELECT key, logp FROM {_TABLE} WHERE key IN ({marks})", some))
        return found

    def store(self, entries: Mapping[str, float]) -> None:
        """Add entries; all of them or, after a crash, none."""
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
    cache: ReferenceCache, keys: Sequence[str], compute: Callable[[list[list[int]], int], Mapping[str, float]]
) -> tuple[dict[str, float], int]:
    """Look up every key and let the ranks compute the missing ones, each a part. Every rank that reads data calls it.

    Args:
        cache: where to look and store.
        keys: what is needed, the same on all of them.
        compute: gets the positions in `keys` that each data rank is to compute, and which of them this one is; returns
            the values of its part by key, and may return more. It has to make as many passes on every data rank, as
            sharding stage 3 gathers parameters for each.

    Returns:
        The value of every key, and how many were computed.

    Raises:
        UserError: one is not finite; nothing is stored.
    """
    mesh = collective.mesh()
    rank, num_ranks = mesh.data_rank, mesh.degrees.num_data_ranks
    known = cache.lookup(keys)
    # ranks may see different states of a cache that another run is filling: an entry is known if all of them have it
    *have, num_readers = collective.sum_over_readers([*(float(key in known) for key in keys), 1.0])
    missing = [i for i, count in enumerate(have) if count < num_readers]
    if missing:
        # contiguous parts: the two answers of a pair are neighbours, and are computed together
        bounds = [len(missing) * at // num_ranks for at in range(num_ranks + 1)]
        part = range(bounds[rank], bounds[rank + 1])
        mine = compute([missing[first:last] for first, last in itertools.pairwise(bounds)], rank)
        # only its own part: what else `compute` has returned is in the sum by another rank
        values = collective.sum_over_data([mine[keys[i]] if at in part else 0.0 for at, i in enumerate(missing)])
        if not all(map(math.isfinite, values)):
            raise UserError(
                "the initial model gives an answer a log-probability that is infinite or not a number; "
                "look for a fault in its weights"
            )
        fresh = {keys[i]: value for i, value in zip(missing, values)}
        if collective.rank() == 0:
            cache.store(fresh)
        known.update(fresh)
    return {key: known[key] for key in keys}, len(missing)
