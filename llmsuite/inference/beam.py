"""Beam search: the most likely answers, without sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from llmsuite.errors import UserError
from llmsuite.inference.decoder import Cache, Decoder, keep_rows
from llmsuite.inference.sampling import forbid, log_softmax


@dataclasses.dataclass(frozen=True)
class Beams:
    """Width and limits of a search."""

    num_beams: int
    length_penalty: float = 1.0
    """A finished answer's score is its log-probability divided by its number of tokens to this power, the stop token
    counted; above 0 longer answers win, below 0 shorter ones."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """No stop token before this many tokens."""

    def __post_init__(self) -> None:
        """Raises UserError naming an invalid value."""
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
    """Whether it ends with a stop token, rather than at max_new_tokens."""


def beam_search(
    decoder: Decoder,
    prompt: Sequence[int],
    stop_ids: set[int],
    beams: Beams,
    num_answers: int = 1,
    agree: Callable[[list[int]], list[int]] = lambda tokens: tokens,
) -> list[Hypothesis]:
    """The best answers that are found, the best first.

    Each step continues the `num_beams` most likely unfinished texts. The search ends when none of them can still beat
    the worst of the answers that are kept, or at max_new_tokens.

    Args:
        decoder: the model.
        prompt: token ids, at least one.
        stop_ids: tokens that end a text.
        beams: width and limits.
        num_answers: how many; at most num_beams.
        agree: see `llmsuite.inference.batch.Batch`.

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
            logits = np.stack([forbid(row, stop_ids) for row in logits])
        totals = (sums[:, None] + log_softmax(logits)).reshape(-1)
        wanted = min(len(totals), beams.num_beams * (1 + len(stop_ids)))  # enough if every beam could stop
        best = np.argsort(-totals, kind="stable")[:wanted]
        best = np.asarray(agree([int(i) for i in best if np.isfinite(totals[i])]), "int64")
        rows, tokens = np.divmod(best, logits.shape[1])
        kept: list[int] = []
        for place, (row, token) in enumerate(zip(rows, tokens)):
            if int(token) in stop_ids:
                # outside the beam it is no candidate: wider beams would find it
                if place < beams.num_beams:
                    score = float(totals[best[place]]) / length**beams.length_penalty
                    finished.append(Hypothesis(texts[row], score, True))
            elif len(kept) < beams.num_beams:
                kept.append(place)
        finished = _best(finished, num_answers)
        sums = totals[best[kept]]
        texts = [(*texts[rows[i]], int(tokens[i])) for i in kept]
        if not texts or (len(finished) == num_answers and finished[-1].score >= _reachable(sums[0], length, beams)):
            return finished
        cache = keep_rows(cache, [int(rows[i]) for i in kept])
        ids = np.asarray([[text[-1]] for text in texts], "int64")
    scores = sums / beams.max_new_tokens**beams.length_penalty
    return _best([*finished, *(Hypothesis(t, float(s), False) for t, s in zip(texts, scores))], num_answers)


def _best(found: list[Hypothesis], count: int) -> list[Hypothesis]:
    return sorted(found, key=lambda f: -f.score)[:count]


def _reachable(log_probability: float, length: int, beams: Beams) -> float:
    """Upper bound of the score that a text of this length can reach: it only becomes less likely as it grows."""
    at = beams.max_new_tokens if beams.length_penalty > 0 else length + 1
    return float(log_probability) / at**beams.length_penalty
