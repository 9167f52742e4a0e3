"""Log-probabilities of answers under the reference model, the initial one, computed before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.progress import track
from llmsuite.stages.answers import Answer, answer_logps, pack_rows
from llmsuite.stages.reference_cache import ReferenceCache, complete
from llmsuite.train.stage import StageContext


class Reference:
    """Log-probabilities of answers under the reference model."""

    def __init__(self, context: StageContext, batch_size: int):
        """`batch_size`: answers in one forward pass."""
        self._context, self._batch_size = context, batch_size
        self.known: dict[str, float] = {}
        """By key of the answer."""

    def compute(self, model: Any, answers: Iterable[Answer]) -> None:
        """Compute those that are not in the cache. Every rank that reads data has to call it."""
        by_key = {answer.key: answer for answer in answers}
        keys = list(by_key)

        def compute(parts: list[list[int]], rank: int) -> Mapping[str, float]:
            found = [[by_key[keys[i]] for i in part] for part in parts]
            if not self._context.padding_free:  # else nothing is padded, and answers to one prompt stay together
                found = [sorted(part, key=len) for part in found]
            most = max(found, key=len)
            return self._score(model, found[rank], -(-len(most) // self._batch_size), most)

        self.known, computed = complete(ReferenceCache(self._context.model_digest), keys, compute)
        self._context.report(f"reference log-probabilities: {len(keys) - computed} cached, {computed} computed")

    def of(self, answers: Sequence[Answer]) -> np.ndarray:
        """[A], float64: log-probabilities of answers that were computed."""
        return np.array([self.known[answer.key] for answer in answers], dtype="float64")

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
