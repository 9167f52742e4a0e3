"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and its relatives: docs/guide/preference.md.

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> log-probabilities
of the answers, and those of the reference model if the loss has one -> loss.

Shapes: P pairs, A = 2 P answers (chosen first).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from llmsuite.engine.stage import (
    Batch,
    BatchLayout,
    EvalPrompt,
    GeneratingStage,
    LossTerms,
    PrePassKind,
    StageContext,
    Sums,
)
from llmsuite.stages.answers import pack_rows
from llmsuite.stages.pair_loss import PairLoss
from llmsuite.stages.pairs import Pair, Pairs, PairStage, chosen_then_rejected
from llmsuite.stages.reference import Reference
from llmsuite.stages.sections import DpoSection


class DpoStage(PairStage, GeneratingStage["Pair | Pairs"]):
    """Trains on pairs of a chosen and a rejected answer."""

    def __init__(self, section: DpoSection, context: StageContext):
        super().__init__(section, context)
        self._reference_from = section.reference_from
        self._pair_loss = PairLoss(section, section.profile())
        self._reference = Reference(context, 2 * context.train.micro_batch_size)

    # data

    def collate(self, samples: Sequence[Pair | Pairs]) -> Batch:
        """A batch with the chosen answers in the first half and the rejected ones in the second: with padding on the
        right, or all in one row, in which the answers to a prompt share its tokens."""
        answers = chosen_then_rejected(samples)
        one_row = self.context.padding_free
        rows = [list(itertools.chain(*answers))] if one_row else answers
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        batch |= self._pair_loss.entries(batch, np.ones(sum(map(len, answers)) // 2, "float32"))
        if self._reference_from == "cache" and self._reference.table:
            batch["reference"] = self._reference.logps_of([answer for row in answers for answer in row])
        return batch

    # before training, and before each step

    def before_training(self, model: Any, samples: Iterable[Pair | Pairs]) -> None:
        """Compute the log-probabilities under the reference model, which is the initial model."""
        if self._reference_from == "cache":
            pairs = itertools.chain.from_iterable(sample.pairs for sample in samples)
            self._reference.compute(model, (answer for pair in pairs for answer in pair.answers))

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Compute pairs per token, reference log-probabilities or mean log-ratios of a batch."""
        return self._pair_loss.prepass(kind, model, batch)

    def eval_prompts(self, sample: Pair | Pairs) -> Sequence[EvalPrompt]:
        """The prompts with the chosen answers."""
        return [EvalPrompt(tuple(pair.prompt), tuple(pair.chosen)) for pair in sample.pairs]

    # loss

    @property
    def batch_layout(self) -> BatchLayout:
        return dataclasses.replace(self._pair_loss.batch_layout, has_documents=self._is_packed, slots=self._slots)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs, each with weight 1."""
        return self._pair_loss.terms(model, batch)
