"""Advantages of the completions of a global batch, by which the losses of online RL are multiplied.

A missing reward is NaN. It is left out of the mean and the standard deviation of its group, and its completion gets the
advantage 0, so it gives no gradient. C completions; arrays by token are ragged: there is no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

EPSILON = 1e-4
"""Added to standard deviations before dividing by them, as in TRL: a group of almost equal rewards stays finite."""
Estimator = Literal["group", "rloo", "reinforce", "reinforce_baseline"]
Scale = Literal["group", "batch", "none"]

Tokens = list[np.ndarray]
"""For each completion, a float64 array with a value for each of its tokens."""


def advantages(
    rewards: ArrayLike, groups: ArrayLike, estimator: Estimator = "group", scale: Scale = "group"
) -> np.ndarray:
    """Advantage of each completion, [C], float64; 0 where the reward is missing.

    Args:
        rewards: [C], NaN where missing.
        groups: [C], the index of the prompt of each.
        estimator: "group": reward minus the mean of the group (GRPO, Shao et al. 2024, arXiv 2402.03300, eq. in 4.1.2;
            with scale "none" Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). "rloo": minus the mean of the others of its
            group (Ahmadian et al. 2024, arXiv 2402.14740). "reinforce": the reward itself; REINFORCE++ (Hu 2025,
            arXiv 2501.03262) normalises its returns by token, see `whiten`. "reinforce_baseline": minus the mean of
            the group, as REINFORCE++-baseline does before it normalises over the batch.
        scale: the divisor: the standard deviation (ddof 1, plus 1e-4) of the rewards of the group or of the batch, or
            none. With "reinforce" and "reinforce_baseline", "batch" normalises mean and standard deviation of the
            result after the baseline.
    """
    values, num_groups, inverse = _grouped(rewards, groups)
    known = ~np.isnan(values)
    counts = np.bincount(inverse[known], minlength=num_groups)
    means = np.bincount(inverse[known], values[known], num_groups) / np.maximum(counts, 1)
    centred = values.copy() if estimator == "reinforce" else values - means[inverse]
    if estimator == "rloo":
        centred *= (counts / np.maximum(counts - 1, 1))[inverse]
    if scale == "group":
        squares = np.bincount(inverse[known], (values[known] - means[inverse[known]]) ** 2, num_groups)
        centred /= np.sqrt(squares / np.maximum(counts - 1, 1))[inverse] + EPSILON
    elif scale == "batch" and estimator in ("reinforce", "reinforce_baseline"):
        centred = (centred - _mean(centred[known])) / (_std(centred[known]) + EPSILON)
    elif scale == "batch":
        centred /= _std(values[known]) + EPSILON
    return np.where(known, centred, 0.0)


def zero_variance_groups(rewards: ArrayLike, groups: ArrayLike) -> np.ndarray:
    """True for each group whose known rewards are all equal, or that has none: [groups], bool, in the order of their
    indices. Such a group has advantages of 0 and no gradient; dynamic sampling replaces it (DAPO, Yu et al. 2025, arXiv
    2503.14476)."""
    values, num_groups, inverse = _grouped(rewards, groups)
    known = ~np.isnan(values)
    low = np.full(num_groups, np.inf)
    high = np.full(num_groups, -np.inf)
    np.minimum.at(low, inverse[known], values[known])
    np.maximum.at(high, inverse[known], values[known])
    # rewards that differ only by rounding are equal; without a known reward high - low is -inf
    return ~(high - low > 1e-8)


def overlong_penalty(lengths: ArrayLike, max_length: int, buffer: int) -> np.ndarray:
    """Soft length penalty to add to the rewards, [C]: 0 up to max_length - buffer tokens, then linearly down to -1 at
    max_length, and -1 above (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        lengths: [C], tokens of each completion.
        max_length: the limit of tokens.
        buffer: tokens before the limit in which the penalty grows; 0 for no penalty below the limit.
    """
    assert 0 <= buffer <= max_length, (buffer, max_length)
    over = np.asarray(lengths, "float64") - (max_length - buffer)
    if buffer:
        return -np.clip(over / buffer, 0.0, 1.0)
    return -(over > 0).astype("float64")


def returns_to_go(rewards: Sequence[ArrayLike], gamma: float = 1.0) -> Tokens:
    """Discounted returns: for each token, the sum of its reward and of the later ones of its completion.

    Args:
        rewards: for each completion, the rewards of its tokens.
        gamma: the discount.
    """
    returns = []
    for row in rewards:
        values = np.array(row, "float64")
        for t in range(len(values) - 2, -1, -1):
            values[t] += gamma * values[t + 1]
        returns.append(values)
    return returns


def token_rewards(rewards: ArrayLike, kl: Sequence[ArrayLike], beta: float) -> Tokens:
    """Rewards by token that include the KL penalty: -beta x KL for each token, plus the completion's reward on the last
    token (Ouyang et al. 2022, arXiv 2203.02155, eq. 2 by token; REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: [C], none missing.
        kl: for each completion, the k1 estimate of each token.
        beta: weight of the KL.
    """
    values = np.asarray(rewards, "float64")
    assert len(values) == len(kl), (len(values), len(kl))
    assert not np.isnan(values).any(), "leave out completions whose reward is missing"
    found = [-beta * np.asarray(row, "float64") for row in kl]
    for row, reward in zip(found, values):
        row[-1] += reward
    return found


def whiten(
    values: Sequence[ArrayLike],
    mask: Sequence[bool] | None = None,
    sum_over_ranks: Callable[[Sequence[float]], list[float]] = list,
) -> Tokens:
    """Values by token, normalised: minus the mean over all tokens of the batch, divided by the standard deviation (ddof
    1) plus 1e-8. The normalisation of REINFORCE++ (arXiv 2501.03262) and of PPO's advantages.

    Args:
        values: for each completion, the values of its tokens.
        mask: True for completions that enter mean and deviation; None for all.
        sum_over_ranks: sums numbers over the ranks, each of which has a part of the batch.
    """
    rows = [np.asarray(row, "float64") for row in values]
    kept = rows
    if mask is not None:
        kept = [row for row, is_kept in zip(rows, mask, strict=True) if is_kept]
    every = np.concatenate(kept) if kept else np.zeros(0)
    count, summed = sum_over_ranks([float(every.size), float(every.sum())])
    mean = summed / max(count, 1.0)
    # a second pass over the ranks: the mean of squares minus the square of the mean would lose digits
    (squares,) = sum_over_ranks([float(((every - mean) ** 2).sum())])
    scale = math.sqrt(squares / max(count - 1, 1.0)) + 1e-8
    return [(row - mean) / scale for row in rows]


def gae(
    rewards: Sequence[ArrayLike], values: Sequence[ArrayLike], gamma: float = 1.0, lambda_: float = 0.95
) -> tuple[Tokens, Tokens]:
    """Generalised advantage estimation, GAE (Schulman et al. 2015, arXiv 1506.02438, eq. 16), as in PPO.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; the value after the last token is 0. The
    tokens are those that the model sampled: without those of an environment, which therefore discount nothing.

    Args:
        rewards: for each completion, the rewards of its tokens.
        values: for each completion, the critic's value before each token.
        gamma: the discount.
        lambda_: 0 for one-step temporal differences, 1 for the full return.

    Returns:
        Advantages, and returns (advantages + values), which are the targets of the critic.
    """
    advantages_ = []
    returns = []
    for row, critic in zip(rewards, values, strict=True):
        reward = np.asarray(row, "float64")
        value = np.asarray(critic, "float64")
        assert reward.shape == value.shape, (reward.shape, value.shape)
        result = np.zeros_like(reward)
        next_value = advantage = 0.0
        for t in range(len(reward) - 1, -1, -1):
            advantage = reward[t] + gamma * next_value - value[t] + gamma * lambda_ * advantage
            result[t] = advantage
            next_value = value[t]
        advantages_.append(result)
        returns.append(result + value)
    return advantages_, returns


def pass_at(num_right: int, num_samples: int, k: int) -> float:
    """Probability that at least one of k completions is right: 1 - C(n - c, k) / C(n, k), the unbiased estimate of
    Chen et al. 2021, arXiv 2107.03374, eq. 1.

    Args:
        num_right: c, the number of right completions.
        num_samples: n, the number of sampled completions, at least k.
        k: the number of tries.
    """
    assert 0 <= num_right <= num_samples, (num_right, num_samples)
    assert 1 <= k <= num_samples, (k, num_samples)
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _grouped(rewards: ArrayLike, groups: ArrayLike) -> tuple[np.ndarray, int, np.ndarray]:
    """Rewards as float64 [C], the number of groups, and the index of each completion's group among them [C]."""
    values = np.array([np.nan if r is None else r for r in np.asarray(rewards, object).ravel()], "float64")
    indices, inverse = np.unique(np.asarray(groups), return_inverse=True)
    assert values.shape == inverse.shape, (values.shape, inverse.shape)
    return values, len(indices), inverse


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _std(values: np.ndarray) -> float:
    """Standard deviation (ddof 1); 0 for fewer than two values."""
    if values.size > 1:
        return float(values.std(ddof=1))
    return 0.0
