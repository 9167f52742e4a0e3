"""Beam search: the most likely answers, without sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.inference.decoder import Cache, Decoder, select_rows
from llmsuite.inference.sampling import log_softmax, mask_tokens


@dataclasses.dataclass(frozen=True)
class BeamParams:
    """Parameters of beam search: width and limits."""

    num_beams: int
    length_penalty: float = 1.0
    """Exponent of the length, stop token included, by which the log-probability of a finished answer is divided; above
    0 longer answers win, below 0 shorter ones."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """Fewest tokens of an answer: before, no stop token is allowed."""

    def __post_init__(self) -> None:
        """Check the values. Raises UserError naming an invalid one."""
        if self.num_beams < 1:
            raise UserError(f"num_beams: is {self.num_beams}; it has to be 1 or more")
        if self.max_new_tokens < 1 or not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise UserError("max_new_tokens: has to be 1 or more with beams, and not below min_new_tokens")


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A finished text of the search."""

    ids: tuple[int, ...]
    """Token ids without the stop token."""
    score: float
    stopped: bool
    """True where it ends with a stop token, False at max_new_tokens."""


def beam_search(
    decoder: Decoder,
    prompt: Sequence[int],
    stop_ids: set[int],
    beams: BeamParams,
    num_answers: int = 1,
    agree: Callable[[list[int]], list[int]] = lambda tokens: tokens,
) -> list[Hypothesis]:
    """Search the answers of the highest scores; returns them in descending order.

    Each step continues the `num_beams` most likely unfinished texts. The search ends when none of them can still beat
    the worst of the answers that are kept, or at max_new_tokens.

    Args:
        decoder: the model.
        prompt: token ids, at least one.
        stop_ids: tokens that end a text.
        beams: width and limits.
        num_answers: answers to return; at most num_beams.
        agree: as for `llmsuite.inference.batch.Batch`.

    Raises:
        UserError: more answers than beams.
    """
    if num_answers > beams.num_beams:
        raise UserError(f"num_return_sequences: is {num_answers}, more than num_beams = {beams.num_beams}")
    finished: list[Hypothesis] = []
    texts: list[tuple[int, ...]] = [()]
    sums = np.zeros(1)  # log-probability of each text
    cache: Cache | None = None
    ids = np.asarray([prompt], "int64")
    for length in range(1, beams.max_new_tokens + 1):
        logits, cache = decoder.forward(ids, np.zeros(len(texts), "int64"), cache)
        if length <= beams.min_new_tokens:
            logits = np.stack([mask_tokens(row, stop_ids) for row in logits])
        totals = (sums[:, None] + log_softmax(logits)).reshape(-1)
        num_candidates = min(len(totals), beams.num_beams * (1 + len(stop_ids)))  # enough if every beam could stop
        best = np.argsort(-totals, kind="stable")[:num_candidates]
        best = np.asarray(agree([int(i) for i in best if np.isfinite(totals[i])]), "int64")
        rows, tokens = np.divmod(best, logits.shape[1])
        kept: list[int] = []
        for rank, (row, token) in enumerate(zip(rows, tokens)):
            if int(token) in stop_ids:
                # outside the beam it is no candidate: wider beams would find it
                if rank < beams.num_beams:
                    score = float(totals[best[rank]]) / length**beams.length_penalty
                    finished.append(Hypothesis(texts[row], score, True))
            elif len(kept) < beams.num_beams:
                kept.append(rank)
        finished = _best(finished, num_answers)
        sums = totals[best[kept]]
        texts = [(*texts[rows[i]], int(tokens[i])) for i in kept]
        if not texts or (len(finished) == num_answers and finished[-1].score >= _reachable(sums[0], length, beams)):
            return finished
        cache = select_rows(cache, [int(rows[i]) for i in kept])
        ids = np.asarray([[text[-1]] for text in texts], "int64")
    scores = sums / beams.max_new_tokens**beams.length_penalty
    unfinished = [Hypothesis(text, float(score), False) for text, score in zip(texts, scores)]
    return _best([*finished, *unfinished], num_answers)


def _best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:count]


def _reachable(log_probability: float, length: int, beams: BeamParams) -> float:
    """Upper bound of the score that a text of this length can reach: it only becomes less likely as it grows."""
    best_length = beams.max_new_tokens if beams.length_penalty > 0 else length + 1
    return float(log_probability) / best_length**beams.length_penalty
