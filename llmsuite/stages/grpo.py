"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300) and its relatives: docs/guide/rl.md.

prompts -> completions drawn by the model, a group for each prompt -> rewards -> advantages -> log-probabilities of the
completions -> loss, by how much likelier a token is than when it was drawn.

Shapes: C completions, T tokens of completions, one completion after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.rl.advantages import (
    Scale,
    advantages,
    overlong_penalty,
    returns_to_go,
    whitened,
    without_signal,
)
from llmsuite.rl.completion import Completion
from llmsuite.rl.rollouts import RolloutPrompt, Rollouts
from llmsuite.rl.table import completion_rows
from llmsuite.stages import rl_losses
from llmsuite.stages.answers import Answer, leave_out_observed, pack_rows
from llmsuite.stages.by_token import Total, is_counted, put_tokens, rewards_by_token
from llmsuite.stages.completions import CompletionStage
from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.ppo_section import PpoSection
from llmsuite.stages.rl_sections import GrpoSection
from llmsuite.train.stage import Batch, LossTerms, PrePassKind, RolledOut, StageContext, Sums
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class Group:
    """The completions of a prompt with their advantages: a sample, once it is completed."""

    completions: Sequence[Completion]
    advantages: np.ndarray
    """[completions]. Where there are advantages by token, the rewards that these are made of."""
    is_counted: np.ndarray
    """[completions], bool: those that are learnt from."""
    entropy_weight: float = 1.0
    """See `rl_losses.entropy_weight`, of its global batch."""

    @property
    def answers(self) -> list[Answer]:
        return [Answer(list(c.prompt_ids), list(c.ids)) for c in self.completions]


class GrpoStage(CompletionStage):
    """Makes completions likelier that have more reward than others of their prompt."""

    def __init__(self, section: GrpoSection | PpoSection, context: StageContext):
        super().__init__(section, context)
        recipe: Any = context.recipe
        self._loss, self._normaliser, self._level = section.loss, section.normaliser, section.importance_sampling_level
        self._low, self._high, self._dual = section.epsilon, section.upper, section.dual_clip
        self._estimator, self._scale = section.advantage, section.scale_rewards
        self._correction, self._correction_level = section.rollout_correction, section.correction_level
        self._correction_cap = section.correction_cap
        self._beta, self._kl, self._kl_in = section.beta, section.kl, section.kl_in
        self._entropy_coef, self._size = section.entropy_coef, recipe.train.global_batch_size
        self._masks_truncated, self._overlong = section.mask_truncated, section.overlong_buffer
        if self._overlong is not None:
            self._overlong = min(self._overlong, self._longest)
        self._profile = section.profile()
        self._gaps: list[Tensor] = []

    # data

    def row_lengths(self, samples: Sequence[RolloutPrompt | Group]) -> np.ndarray | None:
        """[groups, completions], the last token of each being a target only; where the prompt is shared, [groups, 1]:
        once, and all completions."""
        if not all(isinstance(sample, Group) for sample in samples):
            return None
        rows = [[len(a) - 1 for a in sample.answers] for sample in samples]  # type: ignore[union-attr]
        if self.context.padding_free:
            prompts = [len(sample.completions[0].prompt_ids) for sample in samples]  # type: ignore[union-attr]
            rows = [[sum(row) - (len(row) - 1) * prompt] for row, prompt in zip(rows, prompts)]
        return np.array(rows, "int64")

    def collate(self, samples: Sequence[RolloutPrompt | Group]) -> Batch:
        """All completions of the groups: one a row with padding on the right, or all in one row, where those of a
        prompt share it."""
        groups = [sample for sample in samples if isinstance(sample, Group)]
        if len(groups) < len(samples):  # prompts have nothing to train on
            return {"num_tokens": sum(len(s.ids) for s in samples if isinstance(s, RolloutPrompt)), "num_supervised": 0}
        answers, one_row = [answer for group in groups for answer in group.answers], self.context.padding_free
        rows = [answers] if one_row else [[answer] for answer in answers]
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        leave_out_observed(batch, [c for group in groups for c in group.completions])
        lengths = np.bincount(batch["owners"])
        counted = np.concatenate([group.is_counted for group in groups])
        weights, weight = rl_losses.token_weights(self._normaliser, lengths[counted], self._longest)
        batch["weights"] = np.zeros(lengths.sum(), "float32")
        batch["weights"][np.repeat(counted, lengths)] = weights
        batch["weight"] = weight
        if self._entropy_coef:
            each = np.repeat([group.entropy_weight for group in groups], [len(group.completions) for group in groups])
            batch["entropy_weights"] = np.repeat(each * counted, lengths).astype("float32")
        batch["completion_lengths"] = lengths.tolist()
        batch["rewards"] = np.concatenate([group.advantages for group in groups])
        batch["advantages"] = np.repeat(batch["rewards"], lengths).astype("float32")
        drawn = [logprob for group in groups for c in group.completions for logprob in c.logprobs]
        batch["drawn"] = np.array(drawn, "float32")
        return batch

    # rollouts

    def roll_out(self, step: int, samples: Sequence[RolloutPrompt | Group], rollouts: Rollouts) -> RolledOut:
        """Draw a group for each prompt, or for others in its place, and compare the rewards."""
        filled = self._fill(step, samples, rollouts)
        scored, picked = filled.scored, filled.picked
        rewards, metrics = self._judge(scored)
        flat = np.array([c for group in scored.groups for c in group], object)
        if self._overlong is not None:
            lengths = np.array([len(c.ids) for c in flat])
            rewards = rewards + overlong_penalty(lengths, self._longest, self._overlong).reshape(rewards.shape)
        learnt = rewards.copy()
        if self._is_dynamic:
            learnt[~filled.is_useful] = np.nan
            metrics["groups/drawn"], metrics["groups/missing"] = len(scored.groups), filled.num_missing
        learnt = learnt[picked]
        number = np.repeat(np.arange(len(learnt)), learnt.shape[1])
        scale: Scale = "none" if self._by_token else self._scale
        found = np.zeros(rewards.shape)
        found[picked] = advantages(learnt.ravel(), number, self._estimator, scale).reshape(learnt.shape)
        counted = ~np.isnan(learnt)
        if self._masks_truncated:
            counted &= ~np.array([c.truncated for c in flat]).reshape(rewards.shape)[picked]
        idle = ~filled.is_useful if self._is_dynamic else without_signal(learnt.ravel(), number)
        metrics["groups/without_signal"] = float(idle.mean())
        compared = np.zeros_like(number) if self._estimator == "reinforce" else number
        self._check_signal(step, bool(without_signal(learnt.ravel(), compared).all()))
        groups = self._weighed([Group(scored.groups[i], found[i], row) for i, row in zip(picked, counted)])
        names = self._rewards.names
        shown = np.full_like(found, np.nan) if self._by_token else found
        rows = completion_rows(scored.groups, scored.scores, names, rewards, shown, version=scored.version)
        return RolledOut(groups, metrics, rows)

    @property
    def _by_token(self) -> bool:
        """Whether `finish_rollout` makes advantages by token, of those of completions."""
        return self._kl_in == "reward"

    def finish_rollout(self, batches: Sequence[Batch], total: Total) -> Mapping[str, float]:
        """With the divergence in the reward: what comes from each token on, normalised over all tokens of the rollout
        (REINFORCE++, arXiv 2501.03262)."""
        if self._by_token:
            returns = [row for batch in batches for row in returns_to_go(rewards_by_token(batch, self._beta))]
            if self._scale == "batch":
                counted = [counts for batch in batches for counts in is_counted(batch)]
                returns = whitened(returns, counted=counted, total=total)
            put_tokens(batches, "advantages", returns)
        return {}

    def _weighed(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the weights of their entropies in the global batch that each is of."""
        found: list[Group] = []
        for i in range(0, len(groups), self._size):
            part = groups[i : i + self._size]
            lengths = [c.num_own for group in part for c, counts in zip(group.completions, group.is_counted) if counts]
            weight = rl_losses.entropy_weight(self._normaliser, lengths, self._longest)
            found += [dataclasses.replace(group, entropy_weight=weight) for group in part]
        return found

    # loss

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Log-probabilities of the tokens before the first update, or by the reference."""
        batch["old" if kind == "model" else "reference"] = self._logps(model, batch)[0].numpy()
        return {}

    def _logps(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """[T] each: log-probabilities of the tokens under the distributions they were drawn from, and where it is
        needed the entropy of these."""
        hidden, targets = hidden_at_positions(model, batch), paddle.to_tensor(batch["targets"])  # [T, D]
        if self._temperature != 1:
            hidden = hidden / self._temperature  # as logits are linear in it
        if not self._entropy_coef:
            return -model.token_nll(hidden, targets), None
        nll, entropy = model.token_nll_and_entropy(hidden, targets)
        return -nll, entropy

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the tokens; those of completions that do not count weigh 0."""
        logps, entropy = self._logps(model, batch)
        taken, weights = paddle.to_tensor(batch["advantages"]), paddle.to_tensor(batch["weights"])
        completions = rl_losses.Completions(batch["completion_lengths"])
        old = paddle.to_tensor(batch["old"]) if "old" in batch else logps.detach()
        ratio = rl_losses.ratios(logps, old, self._level, completions)
        if self._loss == "cispo":
            losses = rl_losses.cispo(ratio, logps, taken, 1 + self._high)
        elif self._loss == "sapo":
            losses = rl_losses.sapo(ratio, taken)
        else:
            losses = rl_losses.clipped(ratio, taken, self._low, self._high, self._dual)
        low, high = rl_losses.clip_shares(ratio, taken, self._low, self._high)
        drawn = paddle.to_tensor(batch["drawn"])
        gap = (old - drawn).abs()
        if getattr(model, "is_last", True):
            self._gaps.append(gap.max())
        clips = {"clip_ratio/low": low, "clip_ratio/high": high}
        observed = {"ratio": ratio, "logprob_gap": gap}
        observed |= {name: share for name, share in clips.items() if name in self._profile.sums}
        if self._correction != "none":
            cap, mask = self._correction_cap, self._correction == "mis"
            factors = rl_losses.correction(old, drawn, self._correction_level, completions, cap, mask)
            losses = losses * factors
            bounded = factors == 0 if mask else factors >= cap
            observed |= {"correction": factors, "correction/bounded": bounded.astype("float32")}
        if "reference" in batch:
            observed["kl"] = rl_losses.kl(logps, paddle.to_tensor(batch["reference"]), self._kl)
            losses = losses + self._beta * observed["kl"] if self._kl_in == "loss" else losses
        count = float(len(batch["targets"]))
        total = (losses * weights).sum()
        if entropy is not None:
            observed["entropy/exact"] = entropy
            total = total - self._entropy_coef * (entropy * paddle.to_tensor(batch["entropy_weights"])).sum()
        sums = {name: (values.detach().sum(), count) for name, values in observed.items()}
        return LossTerms(total, batch["weight"], self._profile.checked(sums))

    def maxima(self) -> Mapping[str, float]:
        """The largest difference of a token's log-probabilities."""
        gaps, self._gaps = self._gaps, []
        return {"logprob_gap/max": float(paddle.stack(gaps).max())} if gaps else {}
