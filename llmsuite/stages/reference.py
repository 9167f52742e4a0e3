"""Log-probabilities of answers under the reference model, which is the initial model, computed before the first step.

They take 24 bytes of memory for each answer, plus the tokens of the answers of one chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.progress import track
from llmsuite.devices.tensors import array_of
from llmsuite.engine.stage import StageContext
from llmsuite.stages.answers import Answer, answer_logps, pack_rows
from llmsuite.stages.reference_cache import LogpStore, NoCache, ReferenceCache, complete

_CHUNK_SIZE = 1 << 13
"""Answers that are held in memory and looked up together."""


class LogpTable:
    """Log-probabilities by key of the answer, in 24 bytes each: half a key, 128 bits, identifies an answer."""

    def __init__(self, entries: Mapping[str, float] | None = None):
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        """Sorted keys with their values. Each run is more than twice as long as the next one, so there are few runs to
        search, and a key is merged only a logarithmic number of times."""
        self.add(entries or {})

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._runs)

    def add(self, entries: Mapping[str, float]) -> None:
        """Add entries with new keys."""
        run = _halves(list(entries)), np.array(list(entries.values()), "float64")
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            run = tuple(map(np.concatenate, zip(self._runs.pop(), run)))  # type: ignore[assignment]
        order = np.argsort(run[0], kind="stable")
        self._runs.append((run[0][order], run[1][order]))

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """The log-probabilities of keys, [keys] float64; NaN for a key that is not in the table."""
        queries = _halves(keys)
        values = np.full(len(keys), np.nan)
        for run_keys, run_values in self._runs:
            if len(run_keys):
                at = np.searchsorted(run_keys, queries) % len(run_keys)
                is_found = run_keys[at] == queries
                values[is_found] = run_values[at[is_found]]
        return values


def _halves(keys: Sequence[str]) -> np.ndarray:
    return np.array([bytes.fromhex(key[:32]) for key in keys], "S16")


class Reference:
    """Log-probabilities of answers under the reference model."""

    def __init__(self, context: StageContext, batch_size: int):
        """`batch_size`: answers in one forward pass."""
        self._context = context
        self._batch_size = batch_size
        self.table = LogpTable()

    def compute(self, model: Any, answers: Iterable[Answer]) -> None:
        """Compute those that are not in the cache. A collective call: every data-loading rank has to make it."""
        self.table = LogpTable()
        remaining = iter(answers)
        num_computed = 0
        while chunk := {answer.key: answer for answer in itertools.islice(remaining, _CHUNK_SIZE)}:
            is_new = np.isnan(self.table.find(list(chunk)))
            by_key = {key: answer for (key, answer), new in zip(chunk.items(), is_new) if new}
            found, computed = self._compute(model, by_key)
            self.table.add(found)
            num_computed += computed
        cached = len(self.table) - num_computed
        self._context.report(f"reference log-probabilities: {cached} cached, {num_computed} computed")

    def _compute(self, model: Any, by_key: Mapping[str, Answer]) -> tuple[dict[str, float], int]:
        """The log-probabilities of answers by key, and the number of those that were not in the cache."""
        keys = list(by_key)

        def compute(parts: list[list[int]], rank: int) -> Mapping[str, float]:
            found = []
            for indices in parts:
                part = [by_key[keys[i]] for i in indices]
                if not self._context.padding_free:  # else nothing is padded, and answers to a prompt share it
                    part = sorted(part, key=len)
                found.append(part)
            largest = max(found, key=len)
            # as many passes on every rank: with sharding stage 3 each pass gathers the parameters
            return self._score(model, found[rank], -(-len(largest) // self._batch_size), largest)

        cache: LogpStore = NoCache()
        if self._context.caches_logps:
            cache = ReferenceCache(self._context.model_digest)
        return complete(cache, keys, compute)

    def logps_of(self, answers: Sequence[Answer]) -> np.ndarray:
        """The log-probabilities of answers that were passed to `compute`, [A] float64."""
        found = self.table.find([answer.key for answer in answers])
        assert not np.isnan(found).any(), "computed before training"
        return found

    @paddle.no_grad()
    def _score(
        self, model: Any, answers: Sequence[Answer], num_passes: int, others: Sequence[Answer]
    ) -> dict[str, float]:
        model.eval()
        scores: dict[str, float] = {}
        pad_id = self._context.tokenizer.pad_id
        multiple = self._context.length_multiple
        for i in track(range(num_passes), "reference log-probabilities"):
            start = i * self._batch_size
            stop = (i + 1) * self._batch_size
            part = answers[start:stop] or others[start:stop]  # those of another rank, when this rank has no more
            one_row = self._context.padding_free
            rows = [part] if one_row else [[answer] for answer in part]
            logps = array_of(answer_logps(model, pack_rows(rows, pad_id, multiple, shares_prompts=one_row)))
            scores.update(zip((answer.key for answer in part), map(float, logps)))
        model.train()
        return scores
