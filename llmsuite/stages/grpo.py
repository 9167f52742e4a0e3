"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300) and its relatives: docs/guide/rl.md.

prompts -> a group of completions sampled for each prompt -> rewards -> advantages -> log-probabilities of the
completions -> loss, with the ratio of each token's probability to that under the rollout weights.

Shapes: C completions, T tokens of completions, one completion after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of
from llmsuite.engine.batch import (
    BatchLayout,
    ProgramBatch,
    as_tokens,
    flat_targets,
    sum_of_tokens,
    tensor,
    total,
)
from llmsuite.engine.stage import (
    AsyncRolloutStage,
    Batch,
    LossTerms,
    PrePassKind,
    RolloutResult,
    StageContext,
    Sums,
)
from llmsuite.rl.advantages import (
    Scale,
    advantages,
    overlong_penalty,
    returns_to_go,
    whiten,
    zero_variance_groups,
)
from llmsuite.rl.completion import Completion
from llmsuite.rl.completion_rows import completion_rows
from llmsuite.rl.rollouts import RolloutPrompt, Rollouts
from llmsuite.stages import rl_losses
from llmsuite.stages.answers import Answer, drop_observed_tokens, pack_rows
from llmsuite.stages.completions import CompletionStage
from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.ppo_section import PpoSection
from llmsuite.stages.rl_sections import GrpoSection
from llmsuite.stages.token_values import SumOverRanks, is_trained, rewards_by_token, store_token_values


@dataclasses.dataclass(frozen=True)
class Group:
    """The completions of a prompt with their advantages, or with the rewards for token-level advantages: a sample after
    `roll_out`."""

    completions: Sequence[Completion]
    is_trained: np.ndarray
    """[completions], bool: True for those that are trained on."""
    advantages: np.ndarray | None = None
    """[completions]; None where `finish_rollout` computes those of tokens."""
    rewards: np.ndarray | None = None
    """[completions], from which `finish_rollout` computes token-level advantages: minus the mean of the group with
    advantage reinforce_baseline, and 0 where a reward is missing; None where it does not compute them."""
    entropy_weight: float = 1.0
    """`rl_losses.entropy_weight` of its global batch."""
    with_truncated: np.ndarray | None = None
    """[completions], bool: with `count_truncated`, True for those that count in the mean of the loss, which are those
    that are trained on and those that were masked because they are truncated; else None."""

    @property
    def is_counted(self) -> np.ndarray:
        """[completions], bool: True for those that count in the mean of the loss."""
        return self.is_trained if self.with_truncated is None else self.with_truncated

    @property
    def answers(self) -> list[Answer]:
        return [Answer(list(c.prompt_ids), list(c.ids)) for c in self.completions]


class GrpoStage(CompletionStage, AsyncRolloutStage[Any]):
    """Trains on completions with advantages over the others of their prompt."""

    def __init__(self, section: GrpoSection | PpoSection, context: StageContext):
        super().__init__(section, context)
        self._loss = section.loss
        self._normaliser = section.normaliser
        self._level = section.importance_sampling_level
        self._clip = rl_losses.ClipRange(section.epsilon, section.upper, section.dual_clip)
        self._estimator = section.advantage
        self._scale = section.scale_rewards
        self._correction = section.rollout_correction
        self._correction_level = section.correction_level
        self._correction_cap = section.correction_cap
        self._beta = section.beta
        self._kl = section.kl
        self._kl_in = section.kl_in
        self._entropy_coef = section.entropy_coef
        self._size = context.train.global_batch_size
        self._masks_truncated = section.mask_truncated
        self._counts_truncated = False
        if self._masks_truncated and isinstance(section, GrpoSection):
            self._counts_truncated = section.count_truncated
        self._overlong = section.overlong_buffer
        if self._overlong is not None:
            self._overlong = min(self._overlong, self._max_completion_length)
        self._profile = section.profile()

    # data

    def row_lengths(self, samples: Sequence[RolloutPrompt | Group]) -> np.ndarray | None:
        """The lengths of rows, without the last token of each completion, which is only a target: [groups,
        completions]; with a shared prompt one row of all completions, [groups, 1]."""
        groups = [sample for sample in samples if isinstance(sample, Group)]
        if len(groups) < len(samples):
            return None
        rows = []
        for group in groups:
            lengths = [len(answer) - 1 for answer in group.answers]
            if self.context.padding_free:
                prompt_length = len(group.completions[0].prompt_ids)
                lengths = [sum(lengths) - (len(lengths) - 1) * prompt_length]
            rows.append(lengths)
        return np.array(rows, "int64")

    def collate(self, samples: Sequence[RolloutPrompt | Group]) -> Batch:
        """All completions of the groups: each in a row with padding on the right, or all in one row, in which the
        completions of a prompt share its tokens."""
        groups = [sample for sample in samples if isinstance(sample, Group)]
        if len(groups) < len(samples):  # prompts without completions
            return {"num_tokens": sum(len(s.ids) for s in samples if isinstance(s, RolloutPrompt)), "num_supervised": 0}
        answers = [answer for group in groups for answer in group.answers]
        one_row = self.context.padding_free
        rows = [answers] if one_row else [[answer] for answer in answers]
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        drop_observed_tokens(batch, [c for group in groups for c in group.completions])
        lengths = np.bincount(batch["owners"])
        trained = np.concatenate([group.is_trained for group in groups])
        counted = np.concatenate([group.is_counted for group in groups])
        weights, _ = rl_losses.token_weights(self._normaliser, lengths[trained], self._max_completion_length)
        _, weight = rl_losses.token_weights(self._normaliser, lengths[counted], self._max_completion_length)
        batch["weights"] = np.zeros(lengths.sum(), "float32")
        batch["weights"][np.repeat(trained, lengths)] = weights
        batch["weight"] = weight
        if self._entropy_coef:
            each = np.repeat([group.entropy_weight for group in groups], [len(group.completions) for group in groups])
            batch["entropy_weights"] = np.repeat(each * trained, lengths).astype("float32")
        batch["completion_lengths"] = lengths.tolist()
        if self._has_token_advantages:
            batch["rewards"] = np.concatenate([group.rewards for group in groups if group.rewards is not None])
        else:
            by_completion = np.concatenate([g.advantages for g in groups if g.advantages is not None])
            batch["advantages"] = np.repeat(by_completion, lengths).astype("float32")
        sampled_logps = [logprob for group in groups for c in group.completions for logprob in c.logprobs]
        batch["sampled_logps"] = np.array(sampled_logps, "float32")
        return batch

    # rollouts

    def roll_out(self, step: int, samples: Sequence[RolloutPrompt | Group], rollouts: Rollouts) -> RolloutResult:
        """Sample a group for each prompt, replace groups without a signal if `rollout.dynamic_sampling`, and compute
        advantages."""
        sampled = self._sample_batch(step, samples, rollouts)
        scored = sampled.scored
        picked = sampled.picked
        rewards, metrics = self._reward_metrics(scored)
        flat = np.array([c for group in scored.groups for c in group], object)
        if self._overlong is not None:
            lengths = np.array([len(c.ids) for c in flat])
            penalty = overlong_penalty(lengths, self._max_completion_length, self._overlong)
            rewards = rewards + penalty.reshape(rewards.shape)
        train_rewards = rewards.copy()
        if self._is_dynamic:
            train_rewards[~sampled.is_useful] = np.nan
            metrics["groups/sampled"] = len(scored.groups)
            metrics["groups/missing"] = sampled.num_missing
        train_rewards = train_rewards[picked]
        number = np.repeat(np.arange(len(train_rewards)), train_rewards.shape[1])
        # rewards minus the baseline, from which `finish_rollout` computes token-level advantages; else advantages
        scale: Scale = "none" if self._has_token_advantages else self._scale
        found = advantages(train_rewards.ravel(), number, self._estimator, scale).reshape(train_rewards.shape)
        has_reward = ~np.isnan(train_rewards)
        trained = has_reward
        if self._masks_truncated:
            trained = trained & ~np.array([c.truncated for c in flat]).reshape(rewards.shape)[picked]
        idle = ~sampled.is_useful
        if not self._is_dynamic:
            idle = zero_variance_groups(train_rewards.ravel(), number)
        metrics["groups/without_signal"] = float(idle.mean())
        compared = np.zeros_like(number) if self._estimator == "reinforce" else number
        self._check_signal(step, bool(zero_variance_groups(train_rewards.ravel(), compared).all()))
        groups = []
        shown = np.full(rewards.shape, np.nan if self._has_token_advantages else 0.0)
        for i, row, kept, rewarded in zip(picked, found, trained, has_reward):
            group = Group(scored.groups[i], kept, with_truncated=rewarded if self._counts_truncated else None)
            if self._has_token_advantages:
                groups.append(dataclasses.replace(group, rewards=row))
            else:
                groups.append(dataclasses.replace(group, advantages=row))
                shown[i] = row
        groups = self._with_entropy_weights(groups)
        names = self._rewards.names
        rows = completion_rows(scored.groups, scored.scores, names, rewards, shown, version=scored.version)
        return RolloutResult(groups, metrics, rows)

    @property
    def _has_token_advantages(self) -> bool:
        """True where `finish_rollout` replaces the advantages of completions by token-level ones."""
        return self._kl_in == "reward"

    def begin_rollout(self, step: int, samples: Sequence[Any], rollouts: Rollouts) -> None:
        """Start to sample the completions of a later step."""
        rollouts.begin(samples, step, self._sampling_params)

    def finish_rollout(self, batches: Sequence[Batch], total: SumOverRanks) -> Mapping[str, float]:
        """With the KL penalty in the reward: the return from each token on, normalised over all tokens of the rollout
        if `scale_rewards` is batch (REINFORCE++, arXiv 2501.03262)."""
        if self._has_token_advantages:
            returns = [row for batch in batches for row in returns_to_go(rewards_by_token(batch, self._beta))]
            if self._scale == "batch":
                mask = [counts for batch in batches for counts in is_trained(batch)]
                returns = whiten(returns, mask, total)
            store_token_values(batches, "advantages", returns)
        return {}

    def _with_entropy_weights(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the weight of the entropy in the global batch of each."""
        weighted: list[Group] = []
        for i in range(0, len(groups), self._size):
            part = groups[i : i + self._size]
            lengths = np.array([c.num_sampled for group in part for c in group.completions], "int64")
            trained = lengths[np.concatenate([group.is_trained for group in part])]
            counted = lengths[np.concatenate([group.is_counted for group in part])]
            weight = rl_losses.entropy_weight(self._normaliser, trained, counted, self._max_completion_length)
            weighted += [dataclasses.replace(group, entropy_weight=weight) for group in part]
        return weighted

    # loss

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Store the log-probabilities of the tokens before the first update, or by the reference, in the batch."""
        batch["old" if kind == "model" else "reference"] = array_of(self._logps(model, batch)[0])
        return {}

    def _logps(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the tokens at the rollout temperature, [T]; and the entropy of each distribution [T], or
        None without `entropy_coef`."""
        hidden = hidden_at_positions(model, batch)  # [T, D]
        targets = flat_targets(batch)
        if self._temperature != 1:
            hidden = hidden / self._temperature  # equals dividing the logits, which are linear in it
        if not self._entropy_coef:
            return -as_tokens(model.token_nll(hidden, targets), batch), None
        nll, entropy = model.token_nll_and_entropy(hidden, targets)
        return -as_tokens(nll, batch), as_tokens(entropy, batch)

    @property
    def batch_layout(self) -> BatchLayout:
        names = ["weights", "advantages", "sampled_logps", "old", "reference", "entropy_weights"]
        return BatchLayout(tokens=names)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the tokens; tokens of completions that are not trained on have weight 0."""
        logps, entropy = self._logps(model, batch)
        token_advantages = tensor(batch, "advantages")
        weights = tensor(batch, "weights")
        completions = _completions(batch)
        old = tensor(batch, "old") if "old" in batch else logps.detach()
        ratio = rl_losses.ratios(logps, old, self._level, completions)
        if self._loss == "cispo":
            losses = rl_losses.cispo(ratio, logps, token_advantages, 1 + self._clip.high)
        elif self._loss == "sapo":
            losses = rl_losses.sapo(ratio, token_advantages)
        else:
            losses = rl_losses.ppo_clip(ratio, token_advantages, self._clip)
        low, high = rl_losses.clipped_tokens(ratio, token_advantages, self._clip)
        sampled_logps = tensor(batch, "sampled_logps")
        gap = (old - sampled_logps).abs()
        clips = {"clip_ratio/low": low, "clip_ratio/high": high}
        observed = {"ratio": ratio, "logprob_gap": gap}
        observed |= {name: share for name, share in clips.items() if name in self._profile.sums}
        if self._correction != "none":
            cap = self._correction_cap
            mask = self._correction == "mis"
            level = self._correction_level
            factors = rl_losses.importance_weights(old, sampled_logps, level, completions, cap, mask)
            losses = losses * factors
            bounded = factors == 0 if mask else factors >= cap
            observed |= {"correction": factors, "correction/bounded": bounded.astype("float32")}
        if "reference" in batch:
            observed["kl"] = rl_losses.kl(logps, tensor(batch, "reference"), self._kl)
            if self._kl_in == "loss":
                losses = losses + self._beta * observed["kl"]
        policy_loss = (losses * weights).sum()
        if entropy is not None:
            observed["entropy/exact"] = entropy
            policy_loss = policy_loss - self._entropy_coef * (entropy * tensor(batch, "entropy_weights")).sum()
        count = total(batch, "num_supervised")
        sums = {name: (sum_of_tokens(values.detach(), batch), count) for name, values in observed.items()}
        return LossTerms(
            policy_loss, total(batch, "weight"), self._profile.checked(sums), {"logprob_gap/max": gap.detach()}
        )


def _completions(batch: Batch) -> rl_losses.Partition:
    """The partition of the tokens of a batch into completions."""
    if isinstance(batch, ProgramBatch):  # which has one completion in each row
        return rl_losses.CompletionRows(batch.mask_of_answers())
    return rl_losses.Completions(batch["completion_lengths"])
