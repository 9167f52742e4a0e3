"""Losses of online RL, one function for each published objective, and what they are made of.

T are the tokens that the model wrote in the C completions of a micro-batch, one completion after the other, without
padding and without tokens of an environment. Log-probabilities are those of the distribution that was drawn from: of
logits divided by the temperature. Each function returns one value for each token, without a sum; `token_weights` says
how they are summed. Advantages, old log-probabilities and those of a reference carry no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import paddle
import paddle.nn.functional as F

from llmsuite.typing import Tensor

Level = Literal["token", "sequence"]
Normaliser = Literal["sequence_mean", "token_mean", "constant"]
Estimate = Literal["k1", "k2", "k3", "k1+", "k3+"]


class Completions:
    """Where the tokens of each completion lie among all T."""

    def __init__(self, lengths: Sequence[int]):
        """`lengths` are the tokens of each completion, at least one."""
        self.lengths = [int(length) for length in lengths]
        assert self.lengths, "there is no completion"
        assert min(self.lengths) > 0, self.lengths
        width, total = max(self.lengths), sum(self.lengths)
        grid = np.full([len(self.lengths), width], total, "int64")  # the place behind the last token has a zero
        for row, start, length in zip(grid, itertools.accumulate(self.lengths, initial=0), self.lengths):
            row[:length] = range(start, start + length)
        self._grid = paddle.to_tensor(grid.ravel())
        self._places = paddle.to_tensor(np.flatnonzero(grid.ravel() < total))
        self._shape = list(grid.shape)

    def sum(self, values: Tensor) -> Tensor:
        """[T] to the sum of each completion, [C]."""
        with_zero = paddle.concat([values, paddle.zeros([1], values.dtype)])
        return paddle.gather(with_zero, self._grid).reshape(self._shape).sum(-1)

    def mean(self, values: Tensor) -> Tensor:
        """[T] to the mean of each completion, [C]."""
        return self.sum(values) / paddle.to_tensor(self.lengths, values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """[C] to the value of each token's completion, [T]."""
        return paddle.gather(values.unsqueeze(1).expand(self._shape).reshape([-1]), self._places)


def token_weights(kind: Normaliser, lengths: Sequence[int], max_length: int) -> tuple[np.ndarray, float]:
    """Weights of the tokens in the loss, [T] float32, and the weight of the micro-batch: `LossTerms.total` is the sum
    of weight times loss, and `LossTerms.weight` the second number. Both are sums over completions, so that the loss
    does not depend on how the global batch is cut.

    Args:
        kind: "sequence_mean": the mean over completions of the mean over their tokens (GRPO, Shao et al. 2024, arXiv
            2402.03300, eq. 3; GSPO). "token_mean": the mean over all tokens of the global batch (DAPO, Yu et al. 2025,
            arXiv 2503.14476, eq. 12; CISPO). "constant": the sum over the tokens, divided by the number of completions
            and `max_length` (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).
        lengths: tokens of each completion that is trained on.
        max_length: the limit of tokens of a completion.
    """
    each = np.asarray(lengths, "float64")
    factor = {
        "sequence_mean": 1.0 / each,
        "token_mean": np.ones_like(each),
        "constant": np.full_like(each, 1.0 / max_length),
    }[kind]
    weight = float(each.sum()) if kind == "token_mean" else float(len(each))
    return np.repeat(factor, np.asarray(lengths, "int64")).astype("float32"), weight


def entropy_weight(kind: Normaliser, lengths: Sequence[int], max_length: int) -> float:
    """What the entropy of a token weighs in `LossTerms.total`, so that what is divided by the weight of the global
    batch is the mean over its tokens, whatever the loss is divided by: arguments as of `token_weights`, for the
    completions of the whole global batch. 0 without tokens."""
    _, weight = token_weights(kind, lengths, max_length)
    return weight / sum(lengths) if len(lengths) else 0.0


def ratios(logps: Tensor, old: Tensor, level: Level, completions: Completions) -> Tensor:
    """How much likelier a token is than when it was drawn, [T]: exp(logp - old); at the level of sequences the
    geometric mean over its completion, the same for all its tokens (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7).
    """
    difference = logps - old
    if level == "sequence":
        difference = completions.spread(completions.mean(difference))
    return difference.exp()


# objectives; ratio, advantages and logps [T]


def clipped(
    ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO, Schulman et al. 2017, arXiv 1707.06347, eq. 7; with different
    bounds DAPO, arXiv 2503.14476, eq. 10.

    Args:
        ratio: of `ratios`.
        advantages: of the completion or of the token.
        low: how far below 1 the ratio counts.
        high: how far above 1.
        dual: the loss is at most -`dual` A where A is negative (dual-clip PPO, Ye et al. 2019, arXiv
            1912.09729); above 1 + high. TRL calls it delta. None for no such bound.
    """
    bounded = ratio if dual is None else ratio.clip(max=dual)
    return -paddle.minimum(bounded * advantages, ratio.clip(1 - low, 1 + high) * advantages)


def cispo(ratio: Tensor, logps: Tensor, advantages: Tensor, max_ratio: float) -> Tensor:
    """-sg(min(r, max_ratio)) A logp: MiniMax 2025, CISPO, arXiv 2506.13585, eqs. 4 and 5; no token loses its gradient.
    `max_ratio` is their 1 + epsilon_high; TRL calls it epsilon_high."""
    return -ratio.detach().clip(max=max_ratio) * advantages * logps


def sapo(ratio: Tensor, advantages: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """-4 / t s(t (r - 1)) A, a soft gate in place of a clip: Gao et al. 2025, SAPO, arXiv 2511.20347; t is `positive`
    where A is above 0, else `negative`."""
    temperature = paddle.where(
        advantages > 0, paddle.full_like(advantages, positive), paddle.full_like(advantages, negative)
    )
    return -F.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


def clip_shares(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where `clipped` has no gradient: [T] of 0 and 1 for the lower bound (A below 0), and for the upper one (A above
    0)."""
    ratio = ratio.detach()
    below = paddle.logical_and(ratio < 1 - low, advantages < 0)
    above = paddle.logical_and(ratio > 1 + high, advantages > 0)
    return below.astype("float32"), above.astype("float32")


# the divergence from a reference


def kl(logps: Tensor, reference: Tensor, kind: Estimate) -> Tensor:
    """Estimate of the divergence KL(model || reference) from each token that the model drew, [T]: Schulman 2020,
    joschu.net/blog/kl-approx.html.

    k1 = logp - ref; k2 = k1^2 / 2; k3 = exp(-k1) - 1 + k1, which GRPO uses. As a loss, k2 has the gradient of the
    divergence; that of k1 is 0 on average, and that of k3 belongs to KL(reference || model). "k1+" and "k3+" have the
    value of k1 and k3, and the gradient of k2 (straight-through; the names are verl's). k3 times `ratios` by token has
    the gradient of the divergence too (DeepSeek-V3.2, arXiv 2512.02556; TRL's default). In a reward, take k1 and no
    gradient.
    """
    difference = logps - reference
    square = difference.square() / 2
    if kind == "k2":
        return square
    value = difference if kind.startswith("k1") else paddle.exp(-difference) - 1 + difference
    return value.detach() + square - square.detach() if kind.endswith("+") else value


# log-probabilities of another engine


def correction(
    trainer: Tensor, rollout: Tensor, level: Level, completions: Completions, cap: float, mask: bool
) -> Tensor:
    """Importance weights of tokens that another engine has drawn, [T] without gradient: exp(trainer - rollout), by
    token or as the geometric mean of a completion. They multiply the objective, not the KL.

    Truncated (TIS): at most `cap` (Yao et al. 2025, fengyao.notion.site/off-policy-rl). Masked (MIS): 0 outside of
    [1 / cap, cap] (Liu et al. 2025, "When Speed Kills Stability"; IcePop, arXiv 2510.18855).

    Args:
        trainer: log-probabilities [T] by the training pass, before the first update with these completions.
        rollout: those that the rollout engine gave.
        level: "token", or "sequence": the mean of the log-ratios. Their sum, which TRL takes, leaves the bounds on long
            completions by rounding alone.
        completions: where they lie.
        cap: the largest weight, above 1.
        mask: false to truncate.
    """
    assert cap > 1, cap
    weight = ratios(trainer.detach(), rollout.detach(), level, completions)
    if not mask:
        return weight.clip(max=cap)
    inside = paddle.logical_and(weight >= 1 / cap, weight <= cap)
    return weight * inside.astype(weight.dtype)


# the critic of PPO


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half of the squared error of values [T], or of values held within `clip` of those before the update, whichever is
    larger: Schulman et al. 2017 in OpenAI's baselines (ppo2); InstructGPT, TRL and verl have it too."""
    error = (values - returns).square()
    if clip is not None:
        near = old + (values - old).clip(-clip, clip)
        error = paddle.maximum(error, (near - returns).square())
    return error / 2
