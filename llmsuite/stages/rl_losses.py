"""Losses of online RL, one function for each published objective, and their building blocks.

T are the tokens that the model sampled in the C completions of a micro-batch, one completion after the other, without
padding and without tokens of an environment. Log-probabilities are those of the sampling distribution: of logits
divided by the temperature. Each function returns one value for each token, without a sum; `token_weights` has the
weights of the sum. In a step program, tokens are the positions [C, L] of rows with one completion each. Advantages, old
log-probabilities and those of a reference carry no gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of, tensors_of

Level = Literal["token", "sequence"]
Normaliser = Literal["sequence_mean", "token_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


class Partition(Protocol):
    """The partition of the tokens into completions."""

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each completion, [T] to [C]."""

    def broadcast(self, values: Tensor) -> Tensor:
        """The value of its completion for each token, [C] to [T]."""


class Completions(Partition):
    """The partition of the T tokens into C completions."""

    def __init__(self, lengths: Sequence[int]):
        """`lengths`: the number of tokens of each completion, at least one."""
        self.lengths = [int(length) for length in lengths]
        assert self.lengths, "there is no completion"
        assert min(self.lengths) > 0, self.lengths
        width = max(self.lengths)
        total = sum(self.lengths)
        grid = np.full([len(self.lengths), width], total, "int64")  # index T is the zero that `sum` appends
        for row, start, length in zip(grid, itertools.accumulate(self.lengths, initial=0), self.lengths):
            row[:length] = range(start, start + length)
        self._grid, self._positions = tensors_of([grid.ravel(), np.flatnonzero(grid.ravel() < total)])
        self._shape = list(grid.shape)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over each completion, [T] to [C]."""
        with_zero = paddle.concat([values, paddle.zeros([1], values.dtype)])
        return paddle.gather(with_zero, self._grid).reshape(self._shape).sum(-1)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each completion, [T] to [C]."""
        return self.sum(values) / tensor_of(self.lengths, values.dtype)

    def broadcast(self, values: Tensor) -> Tensor:
        """The value of its completion for each token, [C] to [T]."""
        return paddle.gather(values.unsqueeze(1).expand(self._shape).reshape([-1]), self._positions)


class CompletionRows(Partition):
    """Completions in a step program, one in each row: tokens are [C, L] there."""

    def __init__(self, mask: Tensor):
        """`mask` [C, L], float32: 1 for the tokens of a completion, else 0."""
        self._mask = mask

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each row, [C, L] to [C]."""
        return (values * self._mask).sum(-1) / self._mask.sum(-1)

    def broadcast(self, values: Tensor) -> Tensor:
        """The value of its row for each token, [C] to [C, L]; 0 for other positions."""
        return values.unsqueeze(-1) * self._mask


def token_weights(kind: Normaliser, lengths: Sequence[int], max_length: int) -> tuple[np.ndarray, float]:
    """Weights of the tokens in the loss, [T] float32, and the weight of the micro-batch.

    `LossTerms.total` is the sum of weight times loss, and `LossTerms.weight` the second number. Both are sums over
    completions, so the loss does not depend on the split of the global batch into micro-batches.

    Args:
        kind: "sequence_mean": the mean over completions of the mean over their tokens (GRPO, Shao et al. 2024, arXiv
            2402.03300, eq. 3; GSPO). "token_mean": the mean over all tokens of the global batch (DAPO, Yu et al. 2025,
            arXiv 2503.14476, eq. 12; CISPO). "constant": the sum over the tokens, divided by the number of completions
            and `max_length` (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).
        lengths: tokens of each completion that is trained on.
        max_length: the limit of tokens of a completion.
    """
    num_tokens = np.asarray(lengths, "float64")
    factor = {
        "sequence_mean": 1.0 / num_tokens,
        "token_mean": np.ones_like(num_tokens),
        "constant": np.full_like(num_tokens, 1.0 / max_length),
    }[kind]
    weight = float(num_tokens.sum()) if kind == "token_mean" else float(len(num_tokens))
    return np.repeat(factor, np.asarray(lengths, "int64")).astype("float32"), weight


def entropy_weight(kind: Normaliser, lengths: Sequence[int], counted: Sequence[int], max_length: int) -> float:
    """Weight of a token's entropy in `LossTerms.total`, for which the entropy term is a mean over the tokens of the
    global batch with every normaliser. Arguments as for `token_weights`, of the completions of the full global batch,
    with those that count in the mean of the loss. 0 without tokens."""
    _, weight = token_weights(kind, counted, max_length)
    return weight / sum(lengths) if len(lengths) else 0.0


def ratios(logps: Tensor, old: Tensor, level: Level, completions: Partition) -> Tensor:
    """Importance ratio of each token, [T]: exp(logp - old); at the level of sequences the geometric mean over its
    completion, equal for all its tokens (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7)."""
    difference = logps - old
    if level == "sequence":
        difference = completions.broadcast(completions.mean(difference))
    return difference.exp()


# objectives; ratio, advantages and logps [T]


@dataclasses.dataclass(frozen=True)
class ClipRange:
    """The bounds of the importance ratio."""

    low: float = 0.2
    """The ratio is clipped below 1 - `low`."""
    high: float = 0.2
    """The ratio is clipped above 1 + `high`."""
    dual: float | None = None
    """The loss is at most -`dual` A where A is negative (dual-clip PPO, Ye et al. 2019, arXiv 1912.09729). Above 1 +
    high. TRL calls it delta. None for no such bound."""


def ppo_clip(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO, Schulman et al. 2017, arXiv 1707.06347, eq. 7; with different
    bounds DAPO, arXiv 2503.14476, eq. 10.

    Args:
        ratio: of `ratios`.
        advantages: of the completion or of the token.
        clip: bounds of the ratio.
    """
    bounded = ratio if clip.dual is None else ratio.clip(max=clip.dual)
    return -paddle.minimum(bounded * advantages, ratio.clip(1 - clip.low, 1 + clip.high) * advantages)


def cispo(ratio: Tensor, logps: Tensor, advantages: Tensor, max_ratio: float) -> Tensor:
    """-sg(min(r, max_ratio)) A logp: MiniMax 2025, CISPO, arXiv 2506.13585, eqs. 4 and 5; no token loses its gradient.
    `max_ratio` is their 1 + epsilon_high; TRL calls it epsilon_high."""
    return -ratio.detach().clip(max=max_ratio) * advantages * logps


def sapo(ratio: Tensor, advantages: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """-4 / t s(t (r - 1)) A, a soft gate instead of a clip: Gao et al. 2025, SAPO, arXiv 2511.20347; t is `positive`
    where A is above 0, else `negative`."""
    temperature = paddle.where(
        advantages > 0, paddle.full_like(advantages, positive), paddle.full_like(advantages, negative)
    )
    return -F.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


def clipped_tokens(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """1 for the tokens without gradient in `ppo_clip`, else 0: [T] for the lower bound (A below 0), and [T] for the
    upper one (A above 0)."""
    ratio = ratio.detach()
    below = paddle.logical_and(ratio < 1 - clip.low, advantages < 0)
    above = paddle.logical_and(ratio > 1 + clip.high, advantages > 0)
    return below.astype("float32"), above.astype("float32")


# the divergence from a reference


def kl(logps: Tensor, reference: Tensor, kind: KlEstimator) -> Tensor:
    """Estimate of the divergence KL(model || reference) from each sampled token, [T]: Schulman 2020,
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
    value = difference
    if kind.startswith("k3"):
        value = paddle.exp(-difference) - 1 + difference
    if kind.endswith("+"):
        # the value of `value`, with the gradient of `square`
        value = value.detach() + square - square.detach()
    return value


# correction of the mismatch between rollout engine and trainer


def importance_weights(
    trainer: Tensor, rollout: Tensor, level: Level, completions: Partition, cap: float, mask: bool
) -> Tensor:
    """Importance weights of tokens that another engine sampled, [T] without gradient: exp(trainer - rollout), by token
    or as the geometric mean over a completion. They multiply the objective, not the KL.

    Truncated (TIS): at most `cap` (Yao et al. 2025, fengyao.notion.site/off-policy-rl). Masked (MIS): 0 outside of
    [1 / cap, cap] (Liu et al. 2025, "When Speed Kills Stability"; IcePop, arXiv 2510.18855).

    Args:
        trainer: log-probabilities [T] by the training pass, before the first update with these completions.
        rollout: log-probabilities [T] from the rollout engine.
        level: "token", or "sequence": the mean of the log-ratios. TRL takes their sum, which on long completions leaves
            the bounds by rounding errors alone.
        completions: the partition of the tokens.
        cap: the largest weight, above 1.
        mask: True to mask, False to truncate.
    """
    assert cap > 1, cap
    weight = ratios(trainer.detach(), rollout.detach(), level, completions)
    if not mask:
        return weight.clip(max=cap)
    inside = paddle.logical_and(weight >= 1 / cap, weight <= cap)
    return weight * inside.astype(weight.dtype)


# the critic of PPO


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half of the squared error of values [T], or of values clipped to within `clip` of those before the update,
    whichever is larger: Schulman et al. 2017 in OpenAI's baselines (ppo2); InstructGPT, TRL and verl have it too."""
    error = (values - returns).square()
    if clip is not None:
        clipped = old + (values - old).clip(-clip, clip)
        error = paddle.maximum(error, (clipped - returns).square())
    return error / 2
