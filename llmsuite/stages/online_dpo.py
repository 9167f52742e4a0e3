"""Online direct preference optimisation (Guo et al. 2024, arXiv 2402.04792): docs/guide/rl.md.

prompts -> completions drawn by the model -> rewards -> of each prompt the best completion and the worst -> the losses
of `dpo`.

Shapes: P pairs, one for each prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.rl.advantages import without_signal
from llmsuite.rl.completion import Completion
from llmsuite.rl.rollouts import RolloutPrompt, Rollouts
from llmsuite.rl.table import completion_rows
from llmsuite.stages.answers import Answer, pack_rows
from llmsuite.stages.completions import CompletionStage
from llmsuite.stages.online_dpo_section import OnlineDpoSection
from llmsuite.stages.pair_loss import PairLoss
from llmsuite.train.stage import Batch, LossTerms, PrePassKind, RolledOut, StageContext, Sums


@dataclasses.dataclass(frozen=True)
class DrawnPair:
    """A prompt, once it is completed, with two of its completions."""

    chosen: Completion
    rejected: Completion
    is_counted: bool
    """False where one is not better than the other, or their rewards are not known: nothing is learnt then."""


class OnlineDpoStage(CompletionStage):
    """Makes the best completion of each prompt likelier against the worst one."""

    def __init__(self, section: OnlineDpoSection, context: StageContext):
        super().__init__(section, context)
        self._pair_loss = PairLoss(section, section.profile(), self._temperature)

    # data

    def row_lengths(self, samples: Sequence[RolloutPrompt | DrawnPair]) -> np.ndarray | None:
        """[pairs, 2]: the last token of a completion is a target only."""
        pairs = [sample for sample in samples if isinstance(sample, DrawnPair)]
        if len(pairs) < len(samples):
            return None
        return np.array([[len(_answer(c)) - 1 for c in (pair.chosen, pair.rejected)] for pair in pairs], "int64")

    def collate(self, samples: Sequence[RolloutPrompt | DrawnPair]) -> Batch:
        """Chosen completions in the first half of the batch, rejected ones in the second; padding on the right, or all
        in one row, where those of a prompt share it."""
        pairs = [sample for sample in samples if isinstance(sample, DrawnPair)]
        if len(pairs) < len(samples):  # prompts have nothing to train on
            return {"num_tokens": sum(len(s.ids) for s in samples if isinstance(s, RolloutPrompt)), "num_supervised": 0}
        both = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
        answers, one_row = [_answer(completion) for completion in both], self.context.padding_free
        rows = [answers] if one_row else [[answer] for answer in answers]
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        batch["pair_weights"] = np.array([pair.is_counted for pair in pairs], "float32")
        batch["weight"] = float(batch["pair_weights"].sum())
        batch["drawn"] = np.array([logprob for completion in both for logprob in completion.logprobs], "float32")
        return batch

    # rollouts

    def roll_out(self, step: int, samples: Sequence[RolloutPrompt | DrawnPair], rollouts: Rollouts) -> RolledOut:
        """Draw completions of each prompt, or of others in its place, and take the best and the worst."""
        filled = self._fill(step, samples, rollouts)
        scored = filled.scored
        rewards, metrics = self._judge(scored)
        number = np.repeat(np.arange(len(rewards)), rewards.shape[1])
        tied, known = without_signal(rewards.ravel(), number), (~np.isnan(rewards)).sum(1)
        best, worst = np.nan_to_num(rewards, nan=-np.inf).argmax(1), np.nan_to_num(rewards, nan=np.inf).argmin(1)
        # where no completion is better, two that differ stand for nothing
        best, worst = np.where(tied, 0, best), np.where(tied, 1, worst)
        metrics["groups/without_signal"] = float(tied.mean())
        metrics["pairs/missing"] = float((known < 2).mean())
        metrics["pairs/tied"] = float((tied & (known >= 2)).mean())
        metrics["pairs/reward_margin"] = _mean_margin(rewards, best, worst, ~tied)
        if self._is_dynamic:
            metrics["groups/drawn"], metrics["groups/missing"] = len(scored.groups), filled.num_missing
        self._check_signal(step, bool(tied.all()))
        pairs = [
            DrawnPair(scored.groups[i][best[i]], scored.groups[i][worst[i]], not tied[i])
            for i in filled.picked.tolist()
        ]
        sides = np.full(rewards.shape, np.nan)
        for i in filled.picked[~tied[filled.picked]]:
            sides[i, best[i]], sides[i, worst[i]] = 1.0, -1.0
        names = self._rewards.names
        rows = completion_rows(scored.groups, scored.scores, names, rewards, sides, version=step - 1)
        return RolledOut(pairs, metrics, rows)

    # loss

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """See `PairLoss.prepass`."""
        return self._pair_loss.prepass(kind, model, batch)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """See `PairLoss.terms`."""
        return self._pair_loss.terms(model, batch)


def _answer(completion: Completion) -> Answer:
    return Answer(list(completion.prompt_ids), list(completion.ids))


def _mean_margin(rewards: np.ndarray, best: np.ndarray, worst: np.ndarray, counted: np.ndarray) -> float:
    """Mean of what the best completion has more than the worst; 0 where no pair counts."""
    rows = np.flatnonzero(counted)
    return float((rewards[rows, best[rows]] - rewards[rows, worst[rows]]).mean()) if len(rows) else 0.0
