"""Dynamic sampling: prompts whose completions teach nothing are replaced by the ones that come behind them (DAPO, Yu et
al. 2025, arXiv 2503.14476, eq. 11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmsuite.rl.rollouts import Scored


@dataclasses.dataclass(frozen=True)
class Filled:
    """What was drawn until a batch was full."""

    scored: Scored
    """The completions of all prompts that were drawn, in the order of drawing."""
    picked: np.ndarray
    """Numbers of the prompts that are the batch, ascending."""
    is_useful: np.ndarray
    """[prompts drawn], bool."""
    rounds: int

    @property
    def num_missing(self) -> int:
        """Places of the batch that have a prompt which is not useful."""
        return int((~self.is_useful[self.picked]).sum())


def draw_until_full(
    samples: Sequence[Any],
    draw: Callable[[Sequence[Any], Sequence[Any]], Scored],
    useful: Callable[[Scored], np.ndarray],
    further: Callable[[int], Sequence[Any]],
    max_rounds: int,
) -> Filled:
    """Draw until there are as many useful prompts as samples, or `max_rounds` times; then the first of the others fill
    the batch.

    A round after the first has as many prompts as it takes at the share that was useful so far, at most as many as the
    first. All of it is a function of the completions and their rewards, so every rank does the same.

    Args:
        samples: prompts of the first round.
        draw: gets prompts, and those that were drawn before.
        useful: whether each prompt is, [prompts].
        further: gives so many further prompts.
        max_rounds: at least 1, the first included.
    """
    drawn, wanted = list(samples), len(samples)
    scored = draw(samples, ())
    found, rounds = useful(scored), 1
    while found.sum() < wanted and rounds < max_rounds:
        num_found = int(found.sum())
        count = -(-(wanted - num_found) * len(drawn) // num_found) if num_found else wanted
        more = list(further(min(count, wanted)))
        part = draw(more, drawn)
        scored = dataclasses.replace(
            part, groups=[*scored.groups, *part.groups], scores=np.concatenate([scored.scores, part.scores])
        )
        found, rounds = np.concatenate([found, useful(part)]), rounds + 1
        drawn += more
    first_useful, others = np.flatnonzero(found)[:wanted], np.flatnonzero(~found)
    picked = np.sort(np.concatenate([first_useful, others[: wanted - len(first_useful)]]))
    return Filled(scored, picked, found, rounds)
