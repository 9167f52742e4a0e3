"""Advantages of completions, over a whole global batch: the numbers that losses of online RL multiply with.

A reward that is missing is NaN. It takes no part in the mean and the standard deviation of its group, and its
completion gets the advantage 0: nothing is learnt of it. C completions; all arrays are ragged, so that there is no
padding whose values could leak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

EPSILON = 1e-4
"""Added to standard deviations, as TRL does."""
Estimator = Literal["group", "rloo", "reinforce", "reinforce_baseline"]
Scale = Literal["group", "batch", "none"]

Tokens = list[np.ndarray]
"""One float64 array for each completion, with a value for each token of it."""


def advantages(
    rewards: ArrayLike, groups: ArrayLike, estimator: Estimator = "group", scale: Scale = "group"
) -> np.ndarray:
    """Advantage of each completion, [C], float64; 0 where the reward is missing.

    Args:
        rewards: [C], NaN where missing.
        groups: [C], the number of the prompt of each.
        estimator: "group": reward minus the mean of the group (GRPO, Shao et al. 2024, arXiv 2402.03300, eq. in 4.1.2;
            with scale "none" Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). "rloo": minus the mean of the others of its
            group (Ahmadian et al. 2024, arXiv 2402.14740). "reinforce": the reward itself; REINFORCE++ (Hu 2025,
            arXiv 2501.03262) normalises its returns by token, see `whitened`. "reinforce_baseline": minus the mean of
            the group, as REINFORCE++-baseline does before it normalises over the batch.
        scale: what the result is divided by, plus 1e-4: the standard deviation of the rewards of the group, that of all
            rewards of the batch, or nothing. Both have n - 1 in the denominator. With "reinforce" and
            "reinforce_baseline", "batch" normalises what is left after the baseline, mean and standard deviation.
    """
    values, numbers, inverse = _grouped(rewards, groups)
    known = ~np.isnan(values)
    counts = np.bincount(inverse[known], minlength=numbers)
    means = np.bincount(inverse[known], values[known], numbers) / np.maximum(counts, 1)
    centred = values.copy() if estimator == "reinforce" else values - means[inverse]
    if estimator == "rloo":
        centred *= (counts / np.maximum(counts - 1, 1))[inverse]
    if scale == "group":
        squares = np.bincount(inverse[known], (values[known] - means[inverse[known]]) ** 2, numbers)
        centred /= np.sqrt(squares / np.maximum(counts - 1, 1))[inverse] + EPSILON
    elif scale == "batch" and estimator in ("reinforce", "reinforce_baseline"):
        centred = (centred - _mean(centred[known])) / (_std(centred[known]) + EPSILON)
    elif scale == "batch":
        centred /= _std(values[known]) + EPSILON
    return np.where(known, centred, 0.0)


def without_signal(rewards: ArrayLike, groups: ArrayLike) -> np.ndarray:
    """For each group, in the order of their numbers, whether all rewards that are there are equal, or none is there:
    [groups], bool. Advantages within such a group teach nothing; dynamic sampling draws other prompts instead (DAPO, Yu
    et al. 2025, arXiv 2503.14476)."""
    values, numbers, inverse = _grouped(rewards, groups)
    known = ~np.isnan(values)
    low, high = np.full(numbers, np.inf), np.full(numbers, -np.inf)
    np.minimum.at(low, inverse[known], values[known])
    np.maximum.at(high, inverse[known], values[known])
    return ~(high - low > 1e-8)


def overlong_penalty(lengths: ArrayLike, max_length: int, buffer: int) -> np.ndarray:
    """Soft punishment of long completions, to add to their rewards, [C]: 0 up to max_length - buffer tokens, then down
    in a straight line to -1 at max_length, and -1 beyond (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        lengths: [C], tokens of each completion.
        max_length: the limit of tokens.
        buffer: tokens before the limit in which the punishment grows; 0 for none below the limit.
    """
    assert 0 <= buffer <= max_length, (buffer, max_length)
    over = np.asarray(lengths, "float64") - (max_length - buffer)
    return -np.clip(over / buffer, 0.0, 1.0) if buffer else -(over > 0).astype("float64")


def returns_to_go(rewards: Sequence[ArrayLike], gamma: float = 1.0) -> Tokens:
    """Discounted sum of the rewards of each token and of those after it in its completion.

    Args:
        rewards: for each completion those of its tokens.
        gamma: the discount.
    """
    found = []
    for row in rewards:
        values = np.array(row, "float64")
        for t in range(len(values) - 2, -1, -1):
            values[t] += gamma * values[t + 1]
        found.append(values)
    return found


def token_rewards(rewards: ArrayLike, kl: Sequence[ArrayLike], beta: float) -> Tokens:
    """Rewards by token with the divergence from the reference in them: -beta x KL of each token, and the completion's
    reward on its last one (Ouyang et al. 2022, arXiv 2203.02155, eq. 2 by token; REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: [C]. A missing one is taken as 0 here, with the KL of its tokens: leave such completions out before.
        kl: for each completion the estimate of each token, k1 without gradient.
        beta: weight of the KL.
    """
    values = np.asarray(rewards, "float64")
    assert len(values) == len(kl), (len(values), len(kl))
    assert not np.isnan(values).any(), "leave out completions whose reward is missing"
    found = [-beta * np.asarray(row, "float64") for row in kl]
    for row, reward in zip(found, values):
        row[-1] += reward
    return found


def whitened(
    values: Sequence[ArrayLike],
    counted: Sequence[bool] | None = None,
    total: Callable[[Sequence[float]], list[float]] = list,
) -> Tokens:
    """Values by token, less their mean over all tokens of the batch and divided by their standard deviation (ddof 1),
    plus 1e-8: the normalisation of REINFORCE++ (arXiv 2501.03262) and of PPO's advantages.

    Args:
        values: for each completion those of its tokens.
        counted: which completions the mean and the deviation are of, None for all.
        total: adds up numbers over the ranks that have a part of the batch each.
    """
    rows = [np.asarray(row, "float64") for row in values]
    kept = rows if counted is None else [row for row, counts in zip(rows, counted, strict=True) if counts]
    every = np.concatenate(kept) if kept else np.zeros(0)
    count, summed = total([float(every.size), float(every.sum())])
    mean = summed / max(count, 1.0)
    (squares,) = total([float(((every - mean) ** 2).sum())])
    scale = math.sqrt(squares / max(count - 1, 1.0)) + 1e-8
    return [(row - mean) / scale for row in rows]


def generalised(
    rewards: Sequence[ArrayLike], values: Sequence[ArrayLike], gamma: float = 1.0, lambda_: float = 0.95
) -> tuple[Tokens, Tokens]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16), of PPO.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; the value after the last token is 0. The
    tokens are the model's own: those of an environment are left out of both arguments, so that they discount nothing.

    Args:
        rewards: for each completion those of its tokens.
        values: the critic's, before each of these tokens.
        gamma: the discount.
        lambda_: 0 for one step ahead, 1 for the whole return.

    Returns:
        Advantages, and returns: what the critic learns, advantages + values.
    """
    found, returns = [], []
    for row, critic in zip(rewards, values, strict=True):
        reward, value = np.asarray(row, "float64"), np.asarray(critic, "float64")
        assert reward.shape == value.shape, (reward.shape, value.shape)
        result = np.zeros_like(reward)
        after = carried = 0.0
        for t in range(len(reward) - 1, -1, -1):
            carried = reward[t] + gamma * after - value[t] + gamma * lambda_ * carried
            result[t], after = carried, value[t]
        found.append(result)
        returns.append(result + value)
    return found, returns


def pass_at(num_right: int, num_drawn: int, k: int) -> float:
    """Probability that at least one of k completions is right: 1 - C(n - c, k) / C(n, k), the unbiased estimate of
    Chen et al. 2021, arXiv 2107.03374, eq. 1.

    Args:
        num_right: c of those that were drawn.
        num_drawn: n, at least k.
        k: completions that one may try.
    """
    assert 0 <= num_right <= num_drawn, (num_right, num_drawn)
    assert 1 <= k <= num_drawn, (k, num_drawn)
    return 1.0 - math.comb(num_drawn - num_right, k) / math.comb(num_drawn, k)


def _grouped(rewards: ArrayLike, groups: ArrayLike) -> tuple[np.ndarray, int, np.ndarray]:
    """Rewards as float64, how many groups there are, and for each completion the place of its group among them."""
    values = np.array([np.nan if r is None else r for r in np.asarray(rewards, object).ravel()], "float64")
    numbers, inverse = np.unique(np.asarray(groups), return_inverse=True)
    assert values.shape == inverse.shape, (values.shape, inverse.shape)
    return values, len(numbers), inverse


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _std(values: np.ndarray) -> float:
    """Standard deviation with n - 1; 0 of fewer than two values."""
    return float(values.std(ddof=1)) if values.size > 1 else 0.0
