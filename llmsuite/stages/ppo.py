"""Proximal policy optimisation with a critic: docs/guide/rl.md.

prompts -> completions drawn by the model -> rewards -> log-probabilities by the reference, values by the critic ->
rewards, advantages and returns by token -> loss of the policy, as in `grpo`; loss of the critic.

Shapes: C completions, T tokens of completions, one completion after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.rl.advantages import Tokens, generalised, whitened
from llmsuite.stages import rl_losses
from llmsuite.stages.by_token import Total, divergence, is_counted, put_tokens, rewards_by_token, rows_of
from llmsuite.stages.grpo import GrpoStage
from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.ppo_section import PpoSection
from llmsuite.train.stage import Batch, LossTerms, StageContext
from llmsuite.typing import Tensor

KL_BOUND = 0.2
"""Further than this from its target the divergence counts no more (Ziegler et al. 2019, arXiv 1909.08593, sec. 2.2)."""


class PpoStage(GrpoStage):
    """Makes tokens likelier after which more came than the critic had expected."""

    def __init__(self, section: PpoSection, context: StageContext):
        super().__init__(section, context)
        self._gamma, self._lambda, self._whitens = section.gamma, section.gae_lambda, section.whiten_advantages
        self._kl_target, self._kl_rate = section.kl_target, section.kl_rate
        self._value_clip = section.critic.value_clip

    def values(self, model: Any, batch: Batch) -> Tensor:
        """[T]: what the critic expects in front of each token, from the hidden state that predicts it."""
        scores: Tensor = model.scores(hidden_at_positions(model, batch))
        return scores

    def finish_rollout(self, batches: Sequence[Batch], total: Total) -> Mapping[str, float]:
        """Advantages and returns of all tokens, and the next weight of the divergence."""
        rewards = [row for batch in batches for row in rewards_by_token(batch, self._beta)]
        values = [row for batch in batches for row in rows_of(batch, batch["values"])]
        counted = [counts for batch in batches for counts in is_counted(batch)]
        found, returns = generalised(rewards, values, self._gamma, self._lambda)
        if self._whitens:
            found = whitened(found, counted=counted, total=total)
        put_tokens(batches, "advantages", found)
        put_tokens(batches, "returns", returns)
        return {**self._told(values, returns, counted, total), **self._follow_target(batches, total)}

    def _told(self, values: Tokens, returns: Tokens, counted: Sequence[bool], total: Total) -> dict[str, float]:
        """Means, and the fraction of the variance of the returns that the critic explains."""
        rows = [(v, r) for v, r, counts in zip(values, returns, counted) if counts]
        expected, came = (np.concatenate([row[i] for row in rows]) if rows else np.zeros(0) for i in (0, 1))
        wrong = came - expected
        count, *sums = total([float(x) for x in (len(came), came.sum(), expected.sum(), wrong.sum())])
        mean, mean_value, mean_error = (x / max(count, 1.0) for x in sums)
        spread, unexplained = total([float(((x - m) ** 2).sum()) for x, m in ((came, mean), (wrong, mean_error))])
        explained = 1 - unexplained / spread if spread > 0 else 0.0
        return {"returns": mean, "critic/values": mean_value, "critic/explained_variance": explained}

    def _follow_target(self, batches: Sequence[Batch], total: Total) -> dict[str, float]:
        """The divergence of a completion, and the weight it had; the next weight comes closer to the target."""
        if not self._beta:
            return {}
        rows = [row for batch in batches for row in rows_of(batch, divergence(batch))]
        summed, count = total([float(sum(row.sum() for row in rows)), float(len(rows))])
        kl, beta = summed / max(count, 1.0), self._beta
        if self._kl_target is not None:
            self._beta *= 1 + self._kl_rate * float(np.clip(kl / self._kl_target - 1, -KL_BOUND, KL_BOUND))
        return {"kl/completion": kl, "beta": beta}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "beta": self._beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._beta = float(state.get("beta", self._beta))

    def critic_loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the tokens; those of completions that do not count weigh 0."""
        values, old = self.values(model, batch), paddle.to_tensor(batch["values"])
        returns, weights = paddle.to_tensor(batch["returns"]), paddle.to_tensor(batch["weights"])
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
