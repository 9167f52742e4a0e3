"""The losses of pairs of a chosen and a rejected answer, shared by `dpo` and `online_dpo`.

Shapes: P pairs, A = 2 P answers (chosen first), N tokens of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.base.typing import Tensor
from llmsuite.contract.specs import StageProfile
from llmsuite.devices.tensors import array_of
from llmsuite.engine.batch import (
    BatchLayout,
    split_pairs,
    stat,
    sum_of_tokens,
    tensor,
    tokens_by_answer,
    total,
)
from llmsuite.engine.stage import Batch, LossTerms, PrePassKind, Sums
from llmsuite.stages import preference_losses
from llmsuite.stages.answers import log_ratios, logps_of_answers, token_nll
from llmsuite.stages.sections import DpoSection

SIDES = "chosen", "rejected"


class PairLoss:
    """The loss of a section with the keys of `dpo`.

    Batches are those of `answers.pack_rows` with `entries`.
    """

    def __init__(self, section: DpoSection, profile: StageProfile, temperature: float = 1.0):
        """`temperature`: logits are divided by it."""
        self._kind = section.loss
        self._beta = section.beta
        self._smoothing = section.label_smoothing
        self._gamma = section.gamma
        self._sft_weight = section.effective_sft_weight
        self._sft_mean = section.sft_mean
        self._has_reference = section.reference_from != "none"
        self._profile = profile
        self._temperature = temperature

    @property
    def batch_layout(self) -> BatchLayout:
        """The entries of batches that `terms` uses, without packing."""
        return BatchLayout(tokens=["sampled_logps"], answers=["reference"], pairs=["pair_weights"], has_pairs=True)

    @staticmethod
    def entries(batch: Batch, pair_weights: np.ndarray) -> Batch:
        """The entries that the loss of a batch of `answers.pack_rows` needs.

        Args:
            batch: the batch.
            pair_weights: [P], float32: 1 for pairs that are trained on, else 0.
        """
        return {
            "pair_weights": pair_weights,
            "chosen_tokens": np.split(np.bincount(batch["owners"]), 2)[0] * pair_weights,
            "weight": float(pair_weights.sum()),
        }

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Compute pairs per token, the reference log-probabilities of the answers, which are stored in the batch, or
        the mean log-ratios of chosen and of rejected answers."""
        if kind == "batch":
            return {"pairs_per_token": (batch["weight"], total(batch, "chosen_tokens"))}
        logps = self._logps(model, batch)[0]
        if kind in ("adapters_off", "reference"):
            batch["reference"] = array_of(logps)
            return {}
        weights = tensor(batch, "pair_weights")
        sides = zip(SIDES, split_pairs(log_ratios(logps, batch), batch))
        return {f"kl/{side}": ((ratios * weights).sum(), batch["weight"]) for side, ratios in sides}

    def terms(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs, each with weight 1. The term of `sft_weight` is a mean as `sft_mean` says."""
        logps, nll = self._logps(model, batch)
        chosen, rejected = split_pairs(logps.astype("float32"), batch)
        weights = tensor(batch, "pair_weights")
        num_pairs = total(batch, "weight")
        losses, reward_chosen, reward_rejected = self._pair_losses(logps, batch)
        loss = (losses * weights).sum()
        observed = _observed(reward_chosen, reward_rejected, chosen, rejected)
        sums = {name: ((v.detach() * weights).sum(), num_pairs) for name, v in observed.items()}
        if self._sft_weight:
            of_chosen = -(chosen * weights)
            sums["nll/chosen"] = of_chosen.detach().sum(), total(batch, "chosen_tokens")
            # the loss is divided by the number of pairs; the factor makes this term a mean over tokens, of the global
            # batch or of this one, and without it the term is a mean over answers
            tokens = split_pairs(tokens_by_answer(batch), batch)[0]
            if self._sft_mean == "answers":
                of_chosen = of_chosen / tokens
            elif self._sft_mean == "micro_batches" and model.training:
                of_chosen = of_chosen * (weights.sum() / (tokens * weights).sum().clip(min=1))
            else:  # evaluations are split into other micro-batches on each mesh
                of_chosen = of_chosen * stat(batch, "pairs_per_token")
            loss = loss + of_chosen.sum() * self._sft_weight
        if "sampled_logps" in batch:
            gap = (nll.detach() + tensor(batch, "sampled_logps")).abs()
            sums["logprob_gap"] = sum_of_tokens(gap, batch), total(batch, "num_supervised")
        return LossTerms(loss, num_pairs, self._profile.checked(sums))

    def _logps(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability of each answer, [A] float64; negative log-probability of each token, [N]."""
        nll = token_nll(model, batch, self._temperature)
        return logps_of_answers(nll, batch), nll

    def _pair_losses(self, logps: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, chosen reward and rejected reward of each pair, [P] each."""
        reference: Sequence[Tensor | None] = [None, None]
        if self._has_reference:
            reference = split_pairs(tensor(batch, "reference"), batch)
        kl: Sequence[Tensor | float] = [0.0, 0.0]
        if self._kind == "kto_pair":
            kl = [stat(batch, f"kl/{side}").clip(min=0.0) for side in SIDES]
        numbers = split_pairs(logps, batch), split_pairs(tokens_by_answer(batch), batch), reference, kl
        chosen, rejected = (_Side(*of_side) for of_side in zip(*numbers))
        return self._losses_of_sides(chosen, rejected)

    def _losses_of_sides(self, chosen: _Side, rejected: _Side) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, chosen reward and rejected reward of each pair, [P] each, as `loss` of the section defines them."""
        if self._kind == "cpo":
            # no reference, and sums over the tokens
            rewards = self._beta * chosen.logps.astype("float32"), self._beta * rejected.logps.astype("float32")
            return preference_losses.sigmoid(rewards[0] - rewards[1], self._smoothing), *rewards
        if not self._has_reference:
            means = chosen.mean_logps, rejected.mean_logps
            rewards = self._beta * means[0], self._beta * means[1]
            if self._kind == "simpo":
                losses = preference_losses.simpo(*means, self._beta, self._gamma, self._smoothing)
            else:
                assert self._kind == "orpo", self._kind
                losses = self._beta * preference_losses.odds_ratio(*means)
            return losses, *rewards
        ratios = chosen.log_ratios, rejected.log_ratios
        rewards = self._beta * ratios[0], self._beta * ratios[1]
        margin = rewards[0] - rewards[1]
        if self._kind == "sigmoid":
            losses = preference_losses.sigmoid(margin, self._smoothing)
        elif self._kind == "hinge":
            losses = preference_losses.hinge(margin)
        elif self._kind == "ipo":
            losses = preference_losses.ipo(margin, self._beta)
        elif self._kind == "ipo_mean":
            losses = preference_losses.ipo(rewards[0] / chosen.tokens - rewards[1] / rejected.tokens, self._beta)
        else:
            assert self._kind == "kto_pair", self._kind
            losses = preference_losses.kto_pair(*ratios, chosen.kl, rejected.kl, self._beta)
        return losses, *rewards


@dataclasses.dataclass(frozen=True)
class _Side:
    """The chosen answers of pairs, or the rejected ones; [P] each."""

    logps: Tensor
    """Log-probabilities, float64."""
    tokens: Tensor
    """Number of tokens of each answer, float32."""
    reference: Tensor | None
    """Log-probabilities under the reference, float64; None without one."""
    kl: Tensor | float
    """Mean log-ratio over the global batch, not below 0, for `kto_pair`."""

    @property
    def log_ratios(self) -> Tensor:
        """Log-ratios to the reference, [P] float32."""
        return (self.logps - self.reference).astype("float32")

    @property
    def mean_logps(self) -> Tensor:
        """Mean log-probability of the tokens of each answer, [P] float32."""
        return self.logps.astype("float32") / self.tokens


def _observed(reward_chosen: Tensor, reward_rejected: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Metrics of pairs from their rewards and log-probabilities, by name, [P] each."""
    margin = reward_chosen - reward_rejected
    return {
        "rewards/chosen": reward_chosen,
        "rewards/rejected": reward_rejected,
        "rewards/margin": margin,
        "rewards/accuracy": (margin > 0).astype("float32"),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
