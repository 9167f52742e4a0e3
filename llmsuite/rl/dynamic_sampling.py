"""Dynamic sampling: prompts whose completions give no gradient are replaced by the next prompts of the data (DAPO, Yu
et al. 2025, arXiv 2503.14476, eq. 11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmsuite.rl.rollouts import Scored


@dataclasses.dataclass(frozen=True)
class SampledBatch:
    """The completions that were sampled for a batch, and the prompts that form it."""

    scored: Scored
    """The completions of all sampled prompts, in the order of sampling."""
    picked: np.ndarray
    """Indices of the prompts that form the batch, ascending."""
    is_useful: np.ndarray
    """[sampled prompts], bool."""
    rounds: int

    @property
    def num_missing(self) -> int:
        """The number of prompts of the batch that are not useful."""
        return int((~self.is_useful[self.picked]).sum())


def sample_until_full(
    samples: Sequence[Any],
    sample: Callable[[Sequence[Any], Sequence[Any]], Scored],
    useful: Callable[[Scored], np.ndarray],
    next_samples: Callable[[int], Sequence[Any]],
    max_rounds: int,
) -> SampledBatch:
    """Sample until there are as many useful prompts as samples, or `max_rounds` times; then fill up with the first
    prompts that are not useful.

    A later round has as many prompts as are needed at the share of useful prompts so far, at most as many as the first.
    All of it is a function of the completions and their rewards, so every rank does the same.

    Args:
        samples: prompts of the first round.
        sample: gets prompts, and those that were sampled before.
        useful: returns a bool for each prompt, [prompts].
        next_samples: returns the given number of next prompts of the data.
        max_rounds: at least 1, the first included.
    """
    sampled = list(samples)
    batch_size = len(samples)
    scored = sample(samples, ())
    is_useful = useful(scored)
    rounds = 1
    while is_useful.sum() < batch_size and rounds < max_rounds:
        num_useful = int(is_useful.sum())
        count = batch_size
        if num_useful:
            count = -(-(batch_size - num_useful) * len(sampled) // num_useful)
        more = list(next_samples(min(count, batch_size)))
        part = sample(more, sampled)
        scored = dataclasses.replace(
            part, groups=[*scored.groups, *part.groups], scores=np.concatenate([scored.scores, part.scores])
        )
        is_useful = np.concatenate([is_useful, useful(part)])
        rounds = rounds + 1
        sampled += more
    first_useful = np.flatnonzero(is_useful)[:batch_size]
    others = np.flatnonzero(~is_useful)
    picked = np.sort(np.concatenate([first_useful, others[: batch_size - len(first_useful)]]))
    return SampledBatch(scored, picked, is_useful, rounds)
