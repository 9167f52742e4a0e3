"""Proximal policy optimisation with a critic: docs/guide/rl.md.

prompts -> completions sampled from the model -> rewards -> log-probabilities by the reference, values by the critic ->
rewards, advantages and returns by token -> loss of the policy, as in `grpo`; loss of the critic.

Shapes: C completions, T tokens of completions, one completion after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.base.typing import Tensor
from llmsuite.engine.batch import tensor
from llmsuite.engine.stage import Batch, CriticStage, LossTerms, StageContext
from llmsuite.rl.advantages import Tokens, gae, whiten
from llmsuite.stages import rl_losses
from llmsuite.stages.grpo import GrpoStage
from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.ppo_section import PpoSection
from llmsuite.stages.token_values import (
    SumOverRanks,
    is_trained,
    reference_kl,
    rewards_by_token,
    split_by_completion,
    store_token_values,
)

KL_BOUND = 0.2
"""Bound of the relative error of the KL divergence in the update of beta (Ziegler et al. 2019, arXiv 1909.08593, sec.
2.2)."""


class PpoStage(GrpoStage, CriticStage[Any]):
    """Trains on tokens with GAE advantages from a critic."""

    def __init__(self, section: PpoSection, context: StageContext):
        super().__init__(section, context)
        self._gamma = section.gamma
        self._lambda = section.gae_lambda
        self._whitens = section.whiten_advantages
        self._kl_target = section.kl_target
        self._kl_rate = section.kl_rate
        self._value_clip = section.critic.value_clip

    def values(self, model: Any, batch: Batch) -> Tensor:
        """The critic's value before each token, [T], from the hidden state that predicts the token."""
        scores: Tensor = model.scores(hidden_at_positions(model, batch))
        return scores

    def finish_rollout(self, batches: Sequence[Batch], total: SumOverRanks) -> Mapping[str, float]:
        """Compute the advantages and returns of all tokens, and adapt the KL coefficient."""
        rewards = [row for batch in batches for row in rewards_by_token(batch, self._beta)]
        values = [row for batch in batches for row in split_by_completion(batch, batch["values"])]
        mask = [counts for batch in batches for counts in is_trained(batch)]
        advantages, returns = gae(rewards, values, self._gamma, self._lambda)
        if self._whitens:
            advantages = whiten(advantages, mask, total)
        store_token_values(batches, "advantages", advantages)
        store_token_values(batches, "returns", returns)
        return {**self._critic_metrics(values, returns, mask, total), **self._adapt_beta(batches, total)}

    def _critic_metrics(
        self, values: Tokens, returns: Tokens, mask: Sequence[bool], total: SumOverRanks
    ) -> dict[str, float]:
        """Mean return and value, and the fraction of the variance of the returns that the critic explains."""
        value_rows = [row for row, is_kept in zip(values, mask) if is_kept]
        return_rows = [row for row, is_kept in zip(returns, mask) if is_kept]
        expected = np.concatenate(value_rows) if value_rows else np.zeros(0)
        observed = np.concatenate(return_rows) if return_rows else np.zeros(0)
        error = observed - expected
        sums = total([float(x) for x in (len(observed), observed.sum(), expected.sum(), error.sum())])
        count = max(sums[0], 1.0)
        mean = sums[1] / count
        mean_value = sums[2] / count
        mean_error = sums[3] / count
        # variances around the means over all ranks, so in a second reduction
        squares = [float(((observed - mean) ** 2).sum()), float(((error - mean_error) ** 2).sum())]
        variance, unexplained = total(squares)
        explained = 1 - unexplained / variance if variance > 0 else 0.0
        return {"returns": mean, "critic/values": mean_value, "critic/explained_variance": explained}

    def _adapt_beta(self, batches: Sequence[Batch], total: SumOverRanks) -> dict[str, float]:
        """Adapt the KL coefficient to `kl_target`. Returns the mean KL divergence of a completion, and the coefficient
        of this rollout."""
        if not self._beta:
            return {}
        rows = [row for batch in batches for row in split_by_completion(batch, reference_kl(batch))]
        summed, count = total([float(sum(row.sum() for row in rows)), float(len(rows))])
        kl = summed / max(count, 1.0)
        beta = self._beta
        if self._kl_target is not None:
            self._beta *= 1 + self._kl_rate * float(np.clip(kl / self._kl_target - 1, -KL_BOUND, KL_BOUND))
        return {"kl/completion": kl, "beta": beta}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "beta": self._beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._beta = float(state.get("beta", self._beta))

    def critic_loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the tokens; tokens of completions that are not trained on have weight 0."""
        values = self.values(model, batch)
        old = tensor(batch, "values")
        returns = tensor(batch, "returns")
        weights = tensor(batch, "weights")
        losses = rl_losses.value_loss(values, old, returns, self._value_clip)
        clip = np.inf if self._value_clip is None else self._value_clip
        observed = {
            "critic/error": (values - returns).abs(),
            "critic/clip_ratio": ((values - old).abs() > clip).astype("float32"),
        }
        sums = {name: ((value.detach() * weights).sum(), batch["weight"]) for name, value in observed.items()}
        assert self._profile.critic is not None
        assert sums.keys() == set(self._profile.critic.sums)
        return LossTerms((losses * weights).sum(), batch["weight"], sums)
