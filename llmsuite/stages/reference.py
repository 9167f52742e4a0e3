"""Log-probabilities of answers under the reference model, the initial one, computed before the first step.

Memory holds 24 bytes for each answer, and the tokens of those only that are computed at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.progress import track
from llmsuite.stages.answers import Answer, answer_logps, pack_rows
from llmsuite.stages.reference_cache import ReferenceCache, complete
from llmsuite.train.stage import StageContext

_AT_ONCE = 1 << 13


class KnownLogps:
    """Log-probabilities by key of the answer, in 24 bytes each: half of a key tells answers apart."""

    def __init__(self, entries: Mapping[str, float] | None = None):
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        """Keys, ascending, with their values. Each run is more than twice as long as the next one."""
        self.add(entries or {})

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self._runs)

    def add(self, entries: Mapping[str, float]) -> None:
        """Add some that are not known yet."""
        run = _halves(list(entries)), np.array(list(entries.values()), "float64")
        while self._runs and len(self._runs[-1][0]) <= 2 * len(run[0]):
            run = tuple(map(np.concatenate, zip(self._runs.pop(), run)))  # type: ignore[assignment]
        order = np.argsort(run[0], kind="stable")
        self._runs.append((run[0][order], run[1][order]))

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """[keys], float64; NaN for those that are not known."""
        wanted, values = _halves(keys), np.full(len(keys), np.nan)
        for known, of_known in self._runs:
            if len(known):
                at = np.searchsorted(known, wanted) % len(known)
                is_here = known[at] == wanted
                values[is_here] = of_known[at[is_here]]
        return values


def _halves(keys: Sequence[str]) -> np.ndarray:
    return np.array([bytes.fromhex(key[:32]) for key in keys], "S16")


class Reference:
    """Log-probabilities of answers under the reference model."""

    def __init__(self, context: StageContext, batch_size: int):
        """`batch_size`: answers in one forward pass."""
        self._context, self._batch_size = context, batch_size
        self.known = KnownLogps()

    def compute(self, model: Any, answers: Iterable[Answer]) -> None:
        """Compute those that are not in the cache. Every rank that reads data has to call it."""
        self.known, left, num_computed = KnownLogps(), iter(answers), 0
        while some := {answer.key: answer for answer in itertools.islice(left, _AT_ONCE)}:
            is_new = np.isnan(self.known.find(list(some)))
            by_key = {key: answer for (key, answer), new in zip(some.items(), is_new) if new}
            found, computed = self._compute(model, by_key)
            self.known.add(found)
            num_computed += computed
        cached = len(self.known) - num_computed
        self._context.report(f"reference log-probabilities: {cached} cached, {num_computed} computed")

    def _compute(self, model: Any, by_key: Mapping[str, Answer]) -> tuple[dict[str, float], int]:
        """Those of some answers, and how many of them were not in the cache."""
        keys = list(by_key)

        def compute(parts: list[list[int]], rank: int) -> Mapping[str, float]:
            found = [[by_key[keys[i]] for i in part] for part in parts]
            if not self._context.padding_free:  # else nothing is padded, and answers to one prompt stay together
                found = [sorted(part, key=len) for part in found]
            most = max(found, key=len)
            return self._score(model, found[rank], -(-len(most) // self._batch_size), most)

        return complete(ReferenceCache(self._context.model_digest), keys, compute)

    def of(self, answers: Sequence[Answer]) -> np.ndarray:
        """[A], float64: log-probabilities of answers that were computed."""
        found = self.known.find([answer.key for answer in answers])
        assert not np.isnan(found).any(), "computed before training"
        return found

    @paddle.no_grad()
    def _score(
        self, model: Any, answers: Sequence[Answer], num_passes: int, others: Sequence[Answer]
    ) -> dict[str, float]:
        model.eval()
        scores: dict[str, float] = {}
        pad_id, multiple = self._context.tokenizer.pad_id, self._context.length_multiple
        for i in track(range(num_passes), "reference log-probabilities"):
            start, stop = i * self._batch_size, (i + 1) * self._batch_size
            part = answers[start:stop] or others[start:stop]  # another rank's, when the own ones are done first
            one_row = self._context.padding_free
            rows = [part] if one_row else [[answer] for answer in part]
            logps = answer_logps(model, pack_rows(rows, pad_id, multiple, shares_prompts=one_row)).numpy()
            scores.update(zip((answer.key for answer in part), map(float, logps)))
        model.train()
        return scores
