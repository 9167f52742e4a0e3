"""Rows of `completions.jsonl`: completions with their rewards and advantages; and the metrics of their lengths."""

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
        version: optimizer steps of the weights that sampled the completions. The random numbers depend on it, on the
            recipe's seed, the prompt and the index of the completion.
    """
    rows = []
    for i, group in enumerate(groups):
        for j, completion in enumerate(group):
            components = dict(zip(names, map(_number, scores[i, j])))
            row = {
                "version": version,
                "group": completion.group,
                "number": completion.number,
                "prompt": completion.prompt,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "num_tokens": completion.num_sampled,
                "reward": _number(rewards[i, j]),
                "rewards": components,
                "advantage": _number(advantages[i, j]),
            }
            rows.append(row | _turns(completion))
    return rows


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Metrics of the entropy and the lengths of completions."""
    lengths = [c.num_sampled for c in completions]
    logprobs = np.concatenate([c.logprobs for c in completions])
    metrics = {
        "entropy": float(-logprobs.mean()),  # unbiased: the tokens are sampled from the model
        "completions/length": float(np.mean(lengths)),
        "completions/length_min": float(np.min(lengths)),
        "completions/length_max": float(np.max(lengths)),
        "completions/truncated": float(np.mean([c.truncated for c in completions])),
    }
    if ended := [c.num_sampled for c in completions if not c.truncated]:
        metrics["completions/length_ended"] = float(np.mean(ended))
    return metrics


def _number(value: float) -> float | None:
    if math.isfinite(value):
        return float(value)
    return None


def _turns(completion: Completion) -> dict[str, Any]:
    """The additional keys of an episode: its turns, and the number of tokens of the environment."""
    if not completion.turns:
        return {}
    turns = [{"role": turn.role, "content": turn.content} for turn in completion.turns]
    more = {"failure": completion.failure} if completion.failure else {}
    return {"turns": turns, "num_observed": len(completion.ids) - completion.num_sampled, **more}
