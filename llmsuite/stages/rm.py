"""Reward model: one score an answer, higher for the better of two (Ouyang et al. 2022, arXiv 2203.02155).

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> score of the last token
of each, its end of sequence -> loss of the difference

Shapes: P pairs, A = 2 P answers (chosen first), L length, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.stages.base import Batch, LossTerms, StageContext
from llmsuite.stages.pairs import Pair, PairStage
from llmsuite.stages.preference_losses import bradley_terry
from llmsuite.stages.sections import RmSection


class RmStage(PairStage):
    """Learns to tell the better of two answers. The model has a score head."""

    def __init__(self, section: RmSection, context: StageContext):
        super().__init__(section, context)
        self._margin, self._centering = section.margin, section.center_rewards

    def row_lengths(self, samples: Sequence[Pair]) -> np.ndarray:
        """[pairs, 2]; the last token is an input too."""
        return super().row_lengths(samples) + 1

    def collate(self, samples: Sequence[Pair]) -> Batch:
        """Chosen answers in the first half of the batch, rejected ones in the second; padding on the right."""
        answers = [pair.answers[side] for side in (0, 1) for pair in samples]
        multiple = self.context.length_multiple
        length = -(-max(map(len, answers)) // multiple) * multiple
        input_ids = np.full([len(answers), length], self.context.tokenizer.pad_id, dtype="int64")
        for i, answer in enumerate(answers):
            input_ids[i, : len(answer)] = answer.prompt + answer.ids
        return {
            "input_ids": input_ids,
            "positions": np.array([i * length + len(answer) - 1 for i, answer in enumerate(answers)]),
            "weight": float(len(samples)),
            "lengths": np.array([len(answer) for answer in answers]),
            "num_tokens": sum(map(len, answers)),
            "num_supervised": len(answers),
        }

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs; every pair weighs 1."""
        hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]))  # [A, L, D]
        last = hidden.flatten(0, 1).index_select(paddle.to_tensor(batch["positions"]), 0)  # [A, D]
        chosen, rejected = model.scores(last).split(2)
        losses = bradley_terry(chosen, rejected, self._margin)
        if self._centering:
            losses = losses + self._centering * (chosen + rejected).square()
        observed = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": (chosen > rejected).astype("float32"),
        }
        num_pairs = batch["weight"]
        return LossTerms(losses.sum(), num_pairs, {name: (v.detach().sum(), num_pairs) for name, v in observed.items()})
