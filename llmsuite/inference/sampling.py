"""Chooses the next token.

Logits of a sequence: penalties, biases -> forbidden tokens -> temperature -> top_k -> top_p -> min_p -> draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from llmsuite.errors import UserError

MAX_TEMPERATURE = 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_PENALTY = 100.0
"""Bounds within which float32 logits of any model stay finite."""

_PENALTY = f"between {-MAX_PENALTY:g} and {MAX_PENALTY:g}"
_NOT_FINITE = "the model's logits are not finite, so that no token can be drawn; its weights have diverged"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability."""
    min_p: float = 0.0
    """Only tokens whose probability is at least this share of the highest one."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by it where positive, else multiplied (Keskar et al.
    2019, arXiv 1909.05858)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once if it is in the answer."""
    seed: int = 0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """No stop token before this many tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    num_logprobs: int | None = None
    """Keep log-probabilities of the chosen token and of this many of the most likely ones; None for none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each once, and what is added to their logits."""

    def __post_init__(self) -> None:
        """Raises UserError naming an invalid value."""
        for name, is_right, what in (
            ("temperature", 0 <= self.temperature <= MAX_TEMPERATURE, f"between 0 and {MAX_TEMPERATURE:g}"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            (
                "repetition_penalty",
                MIN_REPETITION <= self.repetition_penalty <= MAX_REPETITION,
                f"between {MIN_REPETITION:g} and {MAX_REPETITION:g}",
            ),
            ("frequency_penalty", abs(self.frequency_penalty) <= MAX_PENALTY, _PENALTY),
            ("presence_penalty", abs(self.presence_penalty) <= MAX_PENALTY, _PENALTY),
            ("seed", self.seed >= 0, "0 or more"),
            ("max_new_tokens", self.max_new_tokens >= 0, "0 or more"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            ("stop", all(self.stop), "without an empty text"),
            ("logit_bias", all(token >= 0 and abs(bias) <= MAX_PENALTY for token, bias in self.logit_bias), _PENALTY),
            ("num_logprobs", self.num_logprobs is None or self.num_logprobs >= 0, "0 or more"),
        ):
            if not is_right:
                raise UserError(f"{name}: is {getattr(self, name)!r}; it has to be {what}")


def generator(seed: int, number: int = 0) -> np.random.Generator:
    """Random numbers of the `number`-th answer to a prompt, independent of the rest of the batch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))


def penalise(logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Logits [V] with penalties for tokens that occurred, and with biases; a copy when there are any."""
    if sampling.repetition_penalty != 1:
        tokens = np.unique(np.asarray([*prompt, *answer], "int64"))
        logits = logits.copy()
        before = logits[tokens]
        logits[tokens] = np.where(
            before > 0, before / sampling.repetition_penalty, before * sampling.repetition_penalty
        )
    if answer and (sampling.frequency_penalty or sampling.presence_penalty):
        tokens, counts = np.unique(np.asarray(answer, "int64"), return_counts=True)
        logits = logits.copy()
        logits[tokens] -= (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(logits.dtype)
    if sampling.logit_bias:
        chosen, biases = zip(*sampling.logit_bias)
        logits = logits.copy()
        logits[list(chosen)] += np.asarray(biases, logits.dtype)
    return logits


def forbid(logits: np.ndarray, tokens: Collection[int]) -> np.ndarray:
    """Logits [V] of minus infinity for some tokens, which are then never chosen."""
    logits = logits.copy()
    logits[list(tokens)] = -np.inf
    return logits


def choose(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """Index of the next token. logits: [V]. Raises UserError for logits that are not numbers, or all minus infinity."""
    if not np.isfinite(logits.max()):  # NaN and infinity come through
        raise UserError(_NOT_FINITE)
    if sampling.temperature == 0:
        return int(logits.argmax())
    order, probabilities = distribution(logits, sampling)
    order, probabilities = order[probabilities > 0], probabilities[probabilities > 0]
    # an exponential race, in which each token of the vocabulary has a random number of its own. A number looked up in a
    # cumulative sum falls on another token when sums before it are rounded otherwise, as they are in another batch;
    # here the one that comes first has to come first by less than that.
    with np.errstate(over="ignore"):  # one that is next to impossible never comes
        arrivals = random.standard_exponential(len(logits))[order] / probabilities
    return int(order[arrivals.argmin()])


def distribution(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be chosen and their probabilities; sorted by them where any token is excluded."""
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        return np.arange(len(logits)), _softmax(logits, sampling.temperature)
    if 0 < sampling.top_k < len(logits):
        # of equal logits at the border the first are kept: the sort below is stable, the partition is not
        border = np.partition(logits, len(logits) - sampling.top_k)[len(logits) - sampling.top_k]
        candidates = np.flatnonzero(logits >= border)
    else:
        candidates = np.arange(len(logits))
    order = candidates[np.argsort(-logits[candidates], kind="stable")]
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    probabilities = _softmax(logits[order], sampling.temperature)
    # the smallest set that reaches top_p: the token that crosses the line belongs to it, as does the most likely
    before = np.cumsum(probabilities) - probabilities
    kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
    kept[0] = True
    return order[kept], probabilities[kept] / probabilities[kept].sum()


def draw(logits: np.ndarray, temperature: float, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A token of each row, drawn from the whole distribution: the inverse of its cumulative sum at a random number.

    Args:
        logits: [B, V] float32.
        temperature: above 0, or 0 for the most likely token.
        uniforms: [B] random numbers in [0, 1); not looked at when the temperature is 0.

    Returns:
        Tokens [B] and their log-probabilities [B], float64, at this temperature; at 0, those of temperature 1.

    Raises:
        UserError: a logit is not a number, or all of a row are minus infinity.
    """
    scaled = logits / np.float32(temperature or 1.0)
    scaled -= scaled.max(1, keepdims=True)
    sums = np.cumsum(np.exp(scaled), 1, dtype="float64")
    total = sums[:, -1]
    if not np.isfinite(total).all():
        raise UserError(_NOT_FINITE)
    if temperature == 0:
        tokens = logits.argmax(1)
    else:
        found = [np.searchsorted(row, u * end, side="right") for row, u, end in zip(sums, uniforms, total)]
        tokens = np.minimum(np.array(found), logits.shape[1] - 1)
    return tokens, scaled[np.arange(len(tokens)), tokens].astype("float64") - np.log(total)


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    wide = logits.astype("float64")
    with np.errstate(over="ignore"):  # at a temperature of almost 0 all but the likeliest have none
        exponents = np.exp((wide - wide.max()) / temperature)
    return exponents / exponents.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax over the last dim, in float64."""
    wide = logits.astype("float64")
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))
