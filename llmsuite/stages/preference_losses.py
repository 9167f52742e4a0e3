"""Losses of chosen and rejected answers, one function for each published loss.

The log-ratio of an answer is its log-probability minus that of the reference model; a reward is beta times it. Each
function returns one loss for each element, without a sum: P pairs, or A answers.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor

# pairs, against a reference; margin [P]: reward of the chosen answer - reward of the rejected one


def sigmoid(margin: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log s(m) (1 - e) - log s(-m) e, s the sigmoid: Rafailov et al. 2023, arXiv 2305.18290, eq. 7; with e, the
    assumed share of swapped pairs, Mitchell 2023, ericmitchell.ai/cdpo.pdf."""
    return -F.log_sigmoid(margin) * (1 - smoothing) - F.log_sigmoid(-margin) * smoothing


def hinge(margin: Tensor) -> Tensor:
    """max(0, 1 - m): Zhao et al. 2023, SLiC-HF, arXiv 2305.10425, on rewards."""
    return F.relu(1 - margin)


def ipo(margin: Tensor, beta: float) -> Tensor:
    """(m / beta - 1 / (2 beta))^2: Azar et al. 2023, arXiv 2310.12036, eq. 17; beta is its tau. Rewards divided by the
    length of their answers make it the loss that TRL calls ipo."""
    return (margin / beta - 1 / (2 * beta)).square()


def kto_pair(chosen: Tensor, rejected: Tensor, kl_chosen: float, kl_rejected: float, beta: float) -> Tensor:
    """Half of (1 - s(beta (c - z_r))) + (1 - s(beta (z_c - r))): Ethayarajh et al. 2023, Human-Centered Loss Functions,
    contextual.ai/better-cheaper-faster-llm-alignment-with-kto, and as `kto_pair` in TRL and PaddleNLP.

    Each kind of answer is compared with the other kind's mean log-ratio, an estimate of the divergence between model
    and reference, not below 0 and without a gradient. A pair is two answers: with the half, the mean over pairs is the
    mean over answers.

    Args:
        chosen: [P], log-ratios.
        rejected: [P], log-ratios.
        kl_chosen: z_c, mean log-ratio of the chosen answers of the global batch, not below 0.
        kl_rejected: z_r, of the rejected ones.
        beta: the factor in rewards.
    """
    return (F.sigmoid(-beta * (chosen - kl_rejected)) + F.sigmoid(-beta * (kl_chosen - rejected))) / 2


# pairs, without a reference; chosen and rejected [P]: mean log-probability of the tokens of the answer


def simpo(chosen: Tensor, rejected: Tensor, beta: float, gamma: float, smoothing: float = 0.0) -> Tensor:
    """-log s(beta c - beta r - gamma): Meng et al. 2024, arXiv 2405.14734, eq. 6; smoothing as in `sigmoid`."""
    return sigmoid(beta * (chosen - rejected) - gamma, smoothing)


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log s(log odds(c) - log odds(r)), odds(p) = p / (1 - p): Hong et al. 2024, ORPO, arXiv 2403.07691, eqs. 4 and 7.

    The full loss of ORPO is the mean of lambda times this, and the mean negative log-probability of the tokens of the
    chosen answers (eq. 6).
    """
    return -F.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logp: Tensor) -> Tensor:
    logp = logp.clip(max=-1e-6)  # keeps the log-odds of a probability near 1 finite
    return logp - paddle.log(-paddle.expm1(logp))


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log s(c - r - margin), of scores [P]: Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, eq. 1; with
    a margin, Touvron et al. 2023, Llama 2, arXiv 2307.09288, eq. 2."""
    return -F.log_sigmoid(chosen - rejected - margin)


# single answers, against a reference; log_ratios and desirable [A], desirable 1 or 0


def kto(log_ratios: Tensor, desirable: Tensor, beta: float, kl: float) -> Tensor:
    """1 - s(beta (ratio - z)) of a desirable answer, 1 - s(beta (z - ratio)) of an undesirable one: Ethayarajh et al.
    2024, KTO, arXiv 2402.01306, eq. 8, without its weights; kl is z, not below 0 and without a gradient."""
    return F.sigmoid(-beta * (log_ratios - kl) * (2 * desirable - 1))


def apo_zero(log_ratios: Tensor, desirable: Tensor, beta: float) -> Tensor:
    """1 - s(beta ratio) of a desirable answer, s(beta ratio) of an undesirable one: D'Oosterlinck et al. 2024,
    APO-zero, arXiv 2408.06266, where each answer of a pair has its own term in the loss."""
    return F.sigmoid(-beta * log_ratios * (2 * desirable - 1))
