"""Generation with a key-value cache, one sequence at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability."""
    seed: int = 0


def generate(
    model: Any, prompt: Sequence[int], stop_ids: set[int], max_new_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """Yield new token ids one by one; the stop token is not among them.

    Args:
        model: a causal language model with `hidden_states` and `logits`, in evaluation mode.
        prompt: token ids, at least one.
        stop_ids: tokens that end the text.
        max_new_tokens: at most so many.
        sampling: how to choose.
    """
    random = np.random.Generator(np.random.Philox(sampling.seed))
    ids, cache = list(prompt), None
    for _ in range(max_new_tokens):
        with paddle.no_grad():  # not around the yield, where the caller's code runs
            hidden, cache = model.hidden_states(paddle.to_tensor([ids], dtype="int64"), cache)
            logits = model.logits(hidden[:, -1]).astype("float32").numpy()[0]
        token = choose(logits, sampling, random)
        if token in stop_ids:
            return
        yield token
        ids = [token]


def choose(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """Index of the next token. logits: [V]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    wide = logits[order].astype("float64")
    probabilities = np.exp((wide - wide[0]) / sampling.temperature)
    probabilities /= probabilities.sum()
    # the smallest set that reaches top_p: the token that crosses the line belongs to it, and the likeliest always
    before = np.cumsum(probabilities) - probabilities
    kept = before < sampling.top_p
    kept[0] = True
    probabilities = np.where(kept, probabilities, 0.0)
    return int(order[random.choice(len(order), p=probabilities / probabilities.sum())])
