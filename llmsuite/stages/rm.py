"""Reward model: a score for each answer, higher for the better of two (Ouyang et al. 2022, arXiv 2203.02155).

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> score of the last token
of each, its end of sequence -> loss of the difference, less the margin of the pair

Shapes: P pairs, A = 2 P answers (chosen first), L length, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.engine.batch import BatchLayout, split_pairs, tensor, total
from llmsuite.engine.stage import Batch, LossTerms, StageContext
from llmsuite.stages.answers import hidden_of_answers, pack_inputs
from llmsuite.stages.pairs import Pair, Pairs, PairStage, chosen_then_rejected
from llmsuite.stages.preference_losses import bradley_terry
from llmsuite.stages.sections import RmSection


class RmStage(PairStage):
    """Trains a model with a score head to prefer the better of two answers."""

    def __init__(self, section: RmSection, context: StageContext):
        super().__init__(section, context)
        self._margin = section.margin
        self._centering = section.center_rewards
        self._profile = section.profile()

    def row_lengths(self, samples: Sequence[Pair | Pairs]) -> np.ndarray:
        """Lengths of rows, [samples, 2]; the last token of an answer is an input too."""
        return super().row_lengths(samples) + [[len(sample.pairs)] for sample in samples]

    def collate(self, samples: Sequence[Pair | Pairs]) -> Batch:
        """A batch with the chosen answers in the first half and the rejected ones in the second: with padding on the
        right, or all in one row, in which the answers to a prompt share its tokens."""
        rows = chosen_then_rejected(samples)
        one_row = self.context.padding_free
        answers = list(itertools.chain(*rows))
        rows = [answers] if one_row else rows
        given = [pair.margin for sample in samples for pair in sample.pairs]
        margins = [self._margin if margin is None else margin for margin in given]
        packed = pack_inputs(rows, self.context.tokenizer.pad_id, self.context.length_multiple, one_row)
        return packed.batch | {
            "positions": np.array([positions[-1] for positions in packed.positions]),
            "owners": np.arange(len(answers)),
            "margins": np.array(margins, "float32"),
            "pair_weights": np.ones(len(answers) // 2, "float32"),
            "weight": len(answers) / 2,
            "num_tokens": sum(map(len, answers)),
            "num_supervised": len(answers),
        }

    @property
    def batch_layout(self) -> BatchLayout:
        return BatchLayout(
            pairs=["margins", "pair_weights"], has_pairs=True, has_documents=self._is_packed, slots=self._slots
        )

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs, each with weight 1."""
        last = hidden_of_answers(model, batch)  # [A, D]
        chosen, rejected = split_pairs(model.scores(last), batch)
        losses = bradley_terry(chosen, rejected, tensor(batch, "margins"))
        if self._centering:
            losses = losses + self._centering * (chosen + rejected).square()
        observed = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": (chosen > rejected).astype("float32"),
        }
        weights = tensor(batch, "pair_weights")
        num_pairs = total(batch, "weight")
        sums = {name: ((value.detach() * weights).sum(), num_pairs) for name, value in observed.items()}
        return LossTerms((losses * weights).sum(), num_pairs, self._profile.checked(sums))
