"""Reward model: one score an answer, higher for the better of two (Ouyang et al. 2022, arXiv 2203.02155).

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> score of the last token
of each, its end of sequence -> loss of the difference

Shapes: P pairs, A = 2 P answers (chosen first), D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.stages.answers import pack_inputs
from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.pairs import Pair, Pairs, PairStage, chosen_then_rejected
from llmsuite.stages.preference_losses import bradley_terry
from llmsuite.stages.sections import RmSection
from llmsuite.train.stage import Batch, LossTerms, StageContext


class RmStage(PairStage):
    """Trains a model with a score head to prefer the better of two answers."""

    def __init__(self, section: RmSection, context: StageContext):
        super().__init__(section, context)
        self._margin, self._centering = section.margin, section.center_rewards
        self._profile = section.profile()

    def row_lengths(self, samples: Sequence[Pair | Pairs]) -> np.ndarray:
        """[samples, 2]; the last token of an answer is an input too."""
        return super().row_lengths(samples) + [[len(sample.pairs)] for sample in samples]

    def collate(self, samples: Sequence[Pair | Pairs]) -> Batch:
        """Chosen answers in the first half of the batch, rejected ones in the second; padding on the right, or all in
        one row, where answers to the same prompt share it."""
        rows, one_row = chosen_then_rejected(samples), self.context.padding_free
        answers = list(itertools.chain(*rows))
        rows = [answers] if one_row else rows
        packed = pack_inputs(rows, self.context.tokenizer.pad_id, self.context.length_multiple, one_row)
        return packed.batch | {
            "positions": np.array([positions[-1] for positions in packed.positions]),
            "weight": len(answers) / 2,
            "num_tokens": sum(map(len, answers)),
            "num_supervised": len(answers),
        }

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs; every pair weighs 1."""
        last = hidden_at_positions(model, batch)  # [A, D]
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
        sums = {name: (value.detach().sum(), num_pairs) for name, value in observed.items()}
        return LossTerms(losses.sum(), num_pairs, self._profile.checked(sums))
