"""Samples the next token.

Logits of a sequence: penalties, biases -> masked tokens -> temperature -> top_k -> top_p -> min_p -> sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from llmsuite.base.errors import UserError

MAX_TEMPERATURE = 100.0
MIN_REPETITION = 0.01
MAX_REPETITION = 100.0
MAX_PENALTY = 100.0
"""Bounds within which float32 logits of any model stay finite."""

_PENALTY = f"between {-MAX_PENALTY:g} and {MAX_PENALTY:g}"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability."""
    min_p: float = 0.0
    """Only tokens whose probability is at least this fraction of the highest one."""
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
    """Fewest tokens of an answer: before, no stop token is sampled."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    num_logprobs: int | None = None
    """Keep the log-probability of the sampled token and of this many of the most likely ones; None for none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each once, and what is added to their logits."""

    def __post_init__(self) -> None:
        """Check the values. Raises UserError naming an invalid one."""
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


def random_generator(seed: int, number: int = 0) -> np.random.Generator:
    """The random generator of the `number`-th answer to a prompt, independent of the rest of the batch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))


def apply_penalties(logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Logits [V] with penalties for tokens that have occurred, and with biases; a copy where there are any."""
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


def mask_tokens(logits: np.ndarray, tokens: Collection[int]) -> np.ndarray:
    """Logits [V] with minus infinity for some tokens, which are then never sampled."""
    logits = logits.copy()
    logits[list(tokens)] = -np.inf
    return logits


def sample_token(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """Sample the next token.

    Args:
        logits: [V].
        sampling: temperature, top_k, top_p, min_p.
        random: of the sequence.

    Returns:
        The token id.

    Raises:
        UserError: logits are NaN or infinite, or all are minus infinity.
    """
    if not np.isfinite(logits.max()):  # the maximum is NaN or infinite where one logit is
        raise UserError(_unusable(logits))
    if sampling.temperature == 0:
        return int(logits.argmax())
    order, probabilities = distribution(logits, sampling)
    order = order[probabilities > 0]
    probabilities = probabilities[probabilities > 0]
    # An exponential race: each token of the vocabulary has a random number of its own, and the first arrival is
    # sampled. Looking up one number in a cumulative sum would give another token where the sum is rounded differently,
    # as it is in another batch; here rounding only matters where the first two arrivals are that close.
    with np.errstate(over="ignore"):  # a token of almost no probability arrives at infinity
        arrivals = random.standard_exponential(len(logits))[order] / probabilities
    return int(order[arrivals.argmin()])


def _unusable(logits: np.ndarray) -> str:
    """The reason why no token can be sampled by logits [V]."""
    num_nan = int(np.isnan(logits).sum())
    num_infinite = int(np.isposinf(logits).sum())
    if num_nan + num_infinite == 0:
        return "no token is allowed here: the grammar and the stop tokens that are masked leave none"
    return (
        f"the model's logits are not finite ({num_nan:,} NaN and {num_infinite:,} infinite of {len(logits):,}), so no "
        "token can be sampled; its weights have diverged"
    )


def distribution(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Candidate tokens and their probabilities, in float64; sorted by probability where any token is excluded."""
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        return np.arange(len(logits)), _softmax(logits, sampling.temperature)
    if 0 < sampling.top_k < len(logits):
        # of equal logits at the border the first ones are kept: the sort below is stable, the partition is not
        border = np.partition(logits, len(logits) - sampling.top_k)[len(logits) - sampling.top_k]
        candidates = np.flatnonzero(logits >= border)
    else:
        candidates = np.arange(len(logits))
    order = candidates[np.argsort(-logits[candidates], kind="stable")]
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    probabilities = _softmax(logits[order], sampling.temperature)
    # the smallest set that reaches top_p: the token that crosses the threshold belongs to it, and so does the first
    before = np.cumsum(probabilities) - probabilities
    kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
    kept[0] = True
    return order[kept], probabilities[kept] / probabilities[kept].sum()


def sample_by_uniform(
    logits: np.ndarray, temperature: float, uniform: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[int, float]:
    """Sample a token by the inverse of the cumulative sum of its distribution at a random number.

    Args:
        logits: [V] float32.
        temperature: above 0, or 0 for the most likely token.
        uniform: random number in [0, 1); not used at temperature 0.
        top_k: sample only from the k most likely tokens; 0 for all.
        top_p: sample only from the most likely tokens that together reach this probability.

    Returns:
        The token and its log-probability in the full distribution at this temperature; at 0, that of temperature 1.

    Raises:
        UserError: a logit is not finite, or all are minus infinity.
    """
    scaled = logits / np.float32(temperature or 1.0)
    scaled -= scaled.max()  # so that exp does not overflow
    sums = np.cumsum(np.exp(scaled), dtype="float64")  # float32 would lose the tail of a large vocabulary
    total = sums[-1]
    if not np.isfinite(total):
        raise UserError(_unusable(logits))
    if temperature == 0:
        token = int(logits.argmax())
    elif top_k or top_p < 1:
        order, probabilities = distribution(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
        kept = np.cumsum(probabilities)
        token = int(order[min(int(kept.searchsorted(uniform * kept[-1], side="right")), len(order) - 1)])
    else:
        token = min(int(sums.searchsorted(uniform * total, side="right")), len(logits) - 1)
    return token, float(scaled[token].astype("float64") - np.log(total))


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    wide = logits.astype("float64")
    with np.errstate(over="ignore"):  # at a temperature of almost 0 all but the first probability are 0
        exponents = np.exp((wide - wide.max()) / temperature)
    return exponents / exponents.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax over the last dim, in float64, so that sums over many tokens stay exact."""
    wide = logits.astype("float64")
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))
