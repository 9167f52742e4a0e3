"""Rows of `completions.jsonl`: what was written, how it was rewarded, and what was learnt from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.rl.completion import Completion


def completion_rows(
    groups: Sequence[Sequence[Completion]],
    scores: np.ndarray,
    names: Sequence[str],
    rewards: np.ndarray,
    advantages: np.ndarray,
    version: int,
) -> list[dict[str, Any]]:
    """A row for each completion, in the order of prompts and completions.

    Args:
        groups: completions of each prompt.
        scores: [prompts, completions, components], NaN where one is missing, which is null in a row.
        names: of the components.
        rewards: [prompts, completions].
        advantages: [prompts, completions].
        version: optimizer steps that the weights had which drew them. With the recipe's seed, the prompt and the
            number of the completion it is what the random numbers depend on.
    """
    return [
        {
            "version": version,
            "group": completion.group,
            "number": completion.number,
            "prompt": completion.prompt,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "num_tokens": completion.num_own,
            "reward": _number(rewards[i, j]),
            "rewards": {name: _number(score) for name, score in zip(names, scores[i, j])},
            "advantage": _number(advantages[i, j]),
        }
        | _turns(completion)
        for i, group in enumerate(groups)
        for j, completion in enumerate(group)
    ]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _turns(completion: Completion) -> dict[str, Any]:
    """What an episode has beside: its turns by role, and the tokens that the environment has put in."""
    if not completion.turns:
        return {}
    turns = [{"role": turn.role, "content": turn.content} for turn in completion.turns]
    more = {"failure": completion.failure} if completion.failure else {}
    return {"turns": turns, "num_observed": len(completion.ids) - completion.num_own, **more}
