"""The losses of pairs of answers, one chosen and one rejected: what `dpo` and `online_dpo` have in common.

Shapes: P pairs, A = 2 P answers (chosen first), N tokens of answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from llmsuite.specs import StageProfile
from llmsuite.stages import preference_losses
from llmsuite.stages.answers import (
    log_ratios,
    logps_of_answers,
    num_tokens,
    program_inputs,
    program_logps,
    slots_of,
    token_nll,
)
from llmsuite.stages.pairs import side_by_side
from llmsuite.stages.sections import DpoSection
from llmsuite.train.stage import Batch, LossTerms, PrePassKind, Sums
from llmsuite.typing import Tensor

SIDES = "chosen", "rejected"


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
            return {"pairs_per_token": (batch["weight"], _chosen_tokens(batch))}
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
        observed = _observed(reward_chosen, reward_rejected, chosen, rejected)
        sums: dict[str, tuple[Tensor, float]] = {
            name: ((v.detach() * weights).sum(), num_pairs) for name, v in observed.items()
        }
        if self._sft_weight:
            of_chosen = -(chosen * weights).sum()
            sums["nll/chosen"] = of_chosen.detach(), _chosen_tokens(batch)
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
        given = [logps.split(2), paddle.to_tensor(num_tokens(batch)).split(2)]
        reference = paddle.to_tensor(batch["reference"]).split(2) if self._has_reference else [None] * 2
        kl = [0.0] * 2
        if self._kind == "kto_pair":
            kl = [max(0.0, batch["prepass_stats"][f"kl/{side}"]) for side in SIDES]
        return self._of_sides(*(_Side(*numbers) for numbers in zip(*given, reference, kl)))

    def _of_sides(self, chosen: _Side, rejected: _Side) -> tuple[Tensor, Tensor, Tensor]:
        """What `_compare` gives."""
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

    # in programs, where the rejected answer of each pair follows the chosen one

    def program_inputs(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """See `answers.program_inputs`; of the pairs their weights [P] and, [P, 2], what the loss takes of both sides:
        numbers of tokens, log-probabilities under the reference, mean log-ratios of the global batch. Of packed rows
        these are [P, S] and [P, 2, S], P being the rows of chosen answers."""
        found = {name: side_by_side(array) for name, array in program_inputs(batch, length).items()}
        weights, stats = _pair_weights(batch), batch.get("prepass_stats", {})
        of_answers = {"num_tokens": num_tokens(batch)}
        if self._has_reference:
            of_answers["reference"] = batch["reference"]
        if "pairs_per_row" in batch:
            slots = slots_of(batch)
            of_answers = {name: array[slots.answers] for name, array in of_answers.items()}
            of_chosen, is_taken = np.split(slots.answers, 2)[0], np.split(slots.is_taken, 2)[0]
            weights = weights[of_chosen] * is_taken
        found |= {name: np.stack(np.split(array, 2), 1) for name, array in of_answers.items()}
        if self._kind == "kto_pair":
            kl = np.array([max(0.0, stats[f"kl/{side}"]) for side in SIDES], "float32")
            found["kl"] = np.broadcast_to(kl.reshape([1, 2, *[1] * (weights.ndim - 1)]), found["num_tokens"].shape)
        if self._sft_weight:
            found["pairs_per_token"] = np.full(weights.shape, stats["pairs_per_token"], "float32")
        return {**found, "weights": weights}

    def program_weights(self, batch: Batch) -> dict[str, float]:
        """Those of the sums that are no means over pairs."""
        return {"nll/chosen": _chosen_tokens(batch)} if self._sft_weight else {}

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`terms` of `program_inputs`."""
        logps, weights = program_logps(model, inputs), inputs["weights"]
        logps = logps.reshape([-1, 2, *logps.shape[1:]])
        sides = [
            _Side(
                logps[:, i],
                inputs["num_tokens"][:, i],
                inputs["reference"][:, i] if self._has_reference else None,
                inputs["kl"][:, i] if self._kind == "kto_pair" else 0.0,
            )
            for i in (0, 1)
        ]
        losses, reward_chosen, reward_rejected = self._of_sides(*sides)
        chosen, rejected = (side.logps.astype("float32") for side in sides)
        observed = _observed(reward_chosen, reward_rejected, chosen, rejected)
        total = (losses * weights).sum()
        sums = {name: (v.detach() * weights).sum() for name, v in observed.items()}
        if self._sft_weight:
            total = total - (chosen * weights * inputs["pairs_per_token"]).sum() * self._sft_weight
            sums["nll/chosen"] = -(chosen.detach() * weights).sum()
        return {"loss": total, **self._profile.checked(sums)}


@dataclasses.dataclass(frozen=True)
class _Side:
    """The chosen answers of some pairs, or the rejected ones; [P] each."""

    logps: Tensor
    """Log-probabilities, float64."""
    tokens: Tensor
    """How many each answer has, float32."""
    reference: Tensor | None
    """Log-probabilities under the reference, float64; None without one."""
    kl: Tensor | float
    """Mean log-ratio over the global batch, not below 0, for `kto_pair`."""

    @property
    def log_ratios(self) -> Tensor:
        """To the reference, float32."""
        return (self.logps - self.reference).astype("float32")

    @property
    def mean_logps(self) -> Tensor:
        """Means over the tokens of each answer, float32."""
        return self.logps.astype("float32") / self.tokens


def _observed(reward_chosen: Tensor, reward_rejected: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Metrics of pairs by name, [P] each, of their rewards and log-probabilities."""
    margin = reward_chosen - reward_rejected
    return {
        "rewards/chosen": reward_chosen,
        "rewards/rejected": reward_rejected,
        "rewards/margin": margin,
        "rewards/accuracy": (margin > 0).astype("float32"),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }


def _chosen_tokens(batch: Batch) -> float:
    """Tokens of the chosen answers of the pairs that are learnt from."""
    return float((np.split(num_tokens(batch), 2)[0] * _pair_weights(batch)).sum())


def _pair_weights(batch: Batch) -> np.ndarray:
    """[P], float32: 1 for pairs that are learnt from, else 0."""
    given: np.ndarray | None = batch.get("pair_weights")
    return np.ones(len(num_tokens(batch)) // 2, "float32") if given is None else given
