"""The losses of pairs of answers, one chosen and one rejected: what `dpo` and `online_dpo` have in common.

Shapes: P pairs, A = 2 P answers (chosen first), N tokens of answers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from llmsuite.specs import StageProfile
from llmsuite.stages import preference_losses
from llmsuite.stages.answers import log_ratios, logps_of_answers, num_tokens, token_nll
from llmsuite.stages.sections import DpoSection
from llmsuite.train.stage import Batch, LossTerms, PrePassKind, Sums
from llmsuite.typing import Tensor


class PairLoss:
    """The loss of a section with the keys of `dpo`. Batches are those of `answers.pack_rows`, with "weight": the number
    of pairs that are learnt from, and where these are not all, "pair_weights", [P] of 1 and 0."""

    def __init__(self, section: DpoSection, profile: StageProfile, temperature: float = 1.0):
        """`temperature`: what logits are divided by."""
        self._kind, self._beta, self._smoothing = section.loss, section.beta, section.label_smoothing
        self._gamma, self._sft_weight = section.gamma, section.effective_sft_weight
        self._has_reference = section.reference_from != "none"
        self._profile, self._temperature = profile, temperature

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Pairs per token, the reference of these answers, or the mean log-ratios of both kinds of answers."""
        weights = _pair_weights(batch)
        if kind == "batch":
            chosen, _ = np.split(num_tokens(batch), 2)
            return {"pairs_per_token": (batch["weight"], float((chosen * weights).sum()))}
        logps = self._logps(model, batch)[0]
        if kind in ("adapters_off", "reference"):
            batch["reference"] = logps.numpy()
            return {}
        chosen, rejected = log_ratios(logps, batch).split(2)
        counted = paddle.to_tensor(weights)
        return {
            "kl/chosen": ((chosen * counted).sum(), batch["weight"]),
            "kl/rejected": ((rejected * counted).sum(), batch["weight"]),
        }

    def terms(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs; every pair weighs 1. The term of `sft_weight` is a mean over tokens."""
        logps, nll = self._logps(model, batch)
        chosen, rejected = logps.astype("float32").split(2)
        weights, num_pairs = paddle.to_tensor(_pair_weights(batch)), batch["weight"]
        losses, reward_chosen, reward_rejected = self._compare(logps, batch)
        total = (losses * weights).sum()
        margin = reward_chosen - reward_rejected
        observed = {
            "rewards/chosen": reward_chosen,
            "rewards/rejected": reward_rejected,
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).astype("float32"),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        sums: dict[str, tuple[Tensor, float]] = {
            name: ((v.detach() * weights).sum(), num_pairs) for name, v in observed.items()
        }
        if self._sft_weight:
            of_chosen = -(chosen * weights).sum()
            sums["nll/chosen"] = (
                of_chosen.detach(),
                float((np.split(num_tokens(batch), 2)[0] * _pair_weights(batch)).sum()),
            )
            # everything is divided by the number of pairs; this term by that of tokens
            total = total + of_chosen * (self._sft_weight * batch["prepass_stats"]["pairs_per_token"])
        if "drawn" in batch:
            gap = (nll.detach() + paddle.to_tensor(batch["drawn"])).abs()
            sums["logprob_gap"] = gap.sum(), float(len(batch["drawn"]))
        return LossTerms(total, num_pairs, self._profile.checked(sums))

    def _logps(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """[A], float64: log-probability of each answer; [N]: negative ones of the tokens."""
        nll = token_nll(model, batch, self._temperature)
        return logps_of_answers(nll, batch), nll

    def _compare(self, logps: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """[P] each: losses, rewards of the chosen answers, rewards of the rejected ones."""
        if not self._has_reference:
            logps = logps.astype("float32")
            chosen, rejected = (logps / paddle.to_tensor(num_tokens(batch))).split(2)  # mean over the tokens
            rewards = self._beta * chosen, self._beta * rejected
            if self._kind == "simpo":
                losses = preference_losses.simpo(chosen, rejected, self._beta, self._gamma, self._smoothing)
            else:
                assert self._kind == "orpo", self._kind
                losses = self._beta * preference_losses.odds_ratio(chosen, rejected)
            return losses, *rewards
        chosen, rejected = log_ratios(logps, batch).split(2)
        rewards = self._beta * chosen, self._beta * rejected
        margin = rewards[0] - rewards[1]
        if self._kind == "sigmoid":
            losses = preference_losses.sigmoid(margin, self._smoothing)
        elif self._kind == "hinge":
            losses = preference_losses.hinge(margin)
        elif self._kind == "ipo":
            losses = preference_losses.ipo(margin, self._beta)
        elif self._kind == "ipo_mean":
            of_chosen, of_rejected = paddle.to_tensor(num_tokens(batch)).split(2)
            losses = preference_losses.ipo(rewards[0] / of_chosen - rewards[1] / of_rejected, self._beta)
        else:
            assert self._kind == "kto_pair", self._kind
            kl_chosen, kl_rejected = (max(0.0, batch["prepass_stats"][f"kl/{side}"]) for side in ("chosen", "rejected"))
            losses = preference_losses.kto_pair(chosen, rejected, kl_chosen, kl_rejected, self._beta)
        return losses, *rewards


def _pair_weights(batch: Batch) -> np.ndarray:
    """[P], float32: 1 for pairs that are learnt from, else 0."""
    given: np.ndarray | None = batch.get("pair_weights")
    return np.ones(len(num_tokens(batch)) // 2, "float32") if given is None else given
