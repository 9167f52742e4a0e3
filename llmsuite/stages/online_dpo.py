"""Online direct preference optimisation (Guo et al. 2024, arXiv 2402.04792): docs/guide/rl.md.

prompts -> completions sampled from the model -> rewards -> the best and the worst completion of each prompt -> the
losses of `dpo`.

Shapes: P pairs, one for each prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.engine.stage import Batch, BatchLayout, LossTerms, PrePassKind, RolloutResult, StageContext, Sums
from llmsuite.rl.advantages import zero_variance_groups
from llmsuite.rl.completion import Completion
from llmsuite.rl.completion_rows import completion_rows
from llmsuite.rl.rollouts import RolloutPrompt, Rollouts
from llmsuite.stages.answers import Answer, pack_rows
from llmsuite.stages.completions import CompletionStage
from llmsuite.stages.online_dpo_section import OnlineDpoSection
from llmsuite.stages.pair_loss import PairLoss


@dataclasses.dataclass(frozen=True)
class SampledPair:
    """The best and the worst completion of a prompt: a sample after `roll_out`."""

    chosen: Completion
    rejected: Completion
    is_trained: bool
    """False where their rewards are equal or missing; then the pair has no gradient."""


class OnlineDpoStage(CompletionStage):
    """Trains on the best completion of each prompt as the chosen answer, and the worst one as the rejected answer."""

    def __init__(self, section: OnlineDpoSection, context: StageContext):
        super().__init__(section, context)
        self._pair_loss = PairLoss(section, section.profile(), self._temperature)

    # data

    def row_lengths(self, samples: Sequence[RolloutPrompt | SampledPair]) -> np.ndarray | None:
        """The lengths of rows, [pairs, 2]: without the last token of a completion, which is only a target."""
        pairs = [sample for sample in samples if isinstance(sample, SampledPair)]
        if len(pairs) < len(samples):
            return None
        lengths = [(len(_answer(pair.chosen)) - 1, len(_answer(pair.rejected)) - 1) for pair in pairs]
        return np.array(lengths, "int64")

    def collate(self, samples: Sequence[RolloutPrompt | SampledPair]) -> Batch:
        """A batch with the chosen completions in the first half and the rejected ones in the second: with padding on
        the right, or all in one row, in which the completions of a prompt share its tokens."""
        pairs = [sample for sample in samples if isinstance(sample, SampledPair)]
        if len(pairs) < len(samples):  # prompts without completions
            return {"num_tokens": sum(len(s.ids) for s in samples if isinstance(s, RolloutPrompt)), "num_supervised": 0}
        both = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
        answers = [_answer(completion) for completion in both]
        one_row = self.context.padding_free
        rows = [answers] if one_row else [[answer] for answer in answers]
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        batch |= self._pair_loss.entries(batch, np.array([pair.is_trained for pair in pairs], "float32"))
        batch["sampled_logps"] = np.array(
            [logprob for completion in both for logprob in completion.logprobs], "float32"
        )
        return batch

    # rollouts

    def roll_out(self, step: int, samples: Sequence[RolloutPrompt | SampledPair], rollouts: Rollouts) -> RolloutResult:
        """Sample completions of each prompt, replace prompts without a signal if `rollout.dynamic_sampling`, and pick
        the best and the worst completion."""
        sampled = self._sample_batch(step, samples, rollouts)
        scored = sampled.scored
        rewards, metrics = self._reward_metrics(scored)
        number = np.repeat(np.arange(len(rewards)), rewards.shape[1])
        tied = zero_variance_groups(rewards.ravel(), number)
        known = (~np.isnan(rewards)).sum(1)
        best = np.nan_to_num(rewards, nan=-np.inf).argmax(1)
        worst = np.nan_to_num(rewards, nan=np.inf).argmin(1)
        # a tied pair has two different completions and weight 0
        best = np.where(tied, 0, best)
        worst = np.where(tied, 1, worst)
        metrics["groups/without_signal"] = float(tied.mean())
        metrics["pairs/missing"] = float((known < 2).mean())
        metrics["pairs/tied"] = float((tied & (known >= 2)).mean())
        metrics["pairs/reward_margin"] = _mean_margin(rewards, best, worst, ~tied)
        if self._is_dynamic:
            metrics["groups/sampled"] = len(scored.groups)
            metrics["groups/missing"] = sampled.num_missing
        self._check_signal(step, bool(tied.all()))
        pairs = [
            SampledPair(scored.groups[i][best[i]], scored.groups[i][worst[i]], not tied[i])
            for i in sampled.picked.tolist()
        ]
        sides = np.full(rewards.shape, np.nan)
        for i in sampled.picked[~tied[sampled.picked]]:
            sides[i, best[i]] = 1.0
            sides[i, worst[i]] = -1.0
        names = self._rewards.names
        rows = completion_rows(scored.groups, scored.scores, names, rewards, sides, version=step - 1)
        return RolloutResult(pairs, metrics, rows)

    # loss

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Compute pairs per token, reference log-probabilities or mean log-ratios of a batch."""
        return self._pair_loss.prepass(kind, model, batch)

    @property
    def batch_layout(self) -> BatchLayout:
        return self._pair_loss.batch_layout

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs that are trained on, each with weight 1."""
        return self._pair_loss.terms(model, batch)


def _answer(completion: Completion) -> Answer:
    return Answer(list(completion.prompt_ids), list(completion.ids))


def _mean_margin(rewards: np.ndarray, best: np.ndarray, worst: np.ndarray, mask: np.ndarray) -> float:
    """Mean difference between the rewards of the best and the worst completion; 0 if no pair is trained on."""
    rows = np.flatnonzero(mask)
    if not len(rows):
        return 0.0
    return float((rewards[rows, best[rows]] - rewards[rows, worst[rows]]).mean())
