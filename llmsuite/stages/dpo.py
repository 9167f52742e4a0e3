"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and its relatives: docs/guide/preference.md.

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> log-probabilities
of the answers -> loss, against those of the reference model where it has one.

Shapes: P pairs, A = 2 P answers (chosen first).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.stages.answers import pack_rows
from llmsuite.stages.pair_loss import PairLoss
from llmsuite.stages.pairs import Pair, Pairs, PairStage, chosen_then_rejected
from llmsuite.stages.reference import Reference
from llmsuite.stages.sections import DpoSection
from llmsuite.train.stage import Batch, LossTerms, PrePassKind, Question, StageContext, Sums
from llmsuite.typing import Tensor


class DpoStage(PairStage):
    """Makes the chosen answer of each pair likelier against the rejected one."""

    def __init__(self, section: DpoSection, context: StageContext):
        super().__init__(section, context)
        self._takes_reference = section.reference_from
        self._pair_loss = PairLoss(section, section.profile())
        self._reference = Reference(context, 2 * context.recipe.train.micro_batch_size)

    # data

    def collate(self, samples: Sequence[Pair | Pairs]) -> Batch:
        """Chosen answers in the first half of the batch, rejected ones in the second; padding on the right, or all in
        one row, where answers to the same prompt share it."""
        answers, one_row = chosen_then_rejected(samples), self.context.padding_free
        rows = [list(itertools.chain(*answers))] if one_row else answers
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        batch["weight"] = float(sum(map(len, answers)) // 2)
        batch |= self.places(one_row)
        if self._takes_reference == "cache" and self._reference.known:
            batch["reference"] = self._reference.of([answer for row in answers for answer in row])
        return batch

    # before training, and before each step

    def before_training(self, model: Any, samples: Iterable[Pair | Pairs]) -> None:
        """Compute the log-probabilities under the reference model, which is the initial one."""
        if self._takes_reference == "cache":
            pairs = itertools.chain.from_iterable(sample.pairs for sample in samples)
            self._reference.compute(model, (answer for pair in pairs for answer in pair.answers))

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """See `PairLoss.prepass`."""
        return self._pair_loss.prepass(kind, model, batch)

    def questions(self, sample: Pair | Pairs) -> Sequence[Question]:
        """The prompts, with the chosen answers."""
        return [Question(tuple(pair.prompt), tuple(pair.chosen)) for pair in sample.pairs]

    # loss

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """See `PairLoss.terms`."""
        return self._pair_loss.terms(model, batch)

    def program_inputs(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """See `PairLoss.program_inputs`."""
        return self._pair_loss.program_inputs(batch, length)

    def program_weights(self, batch: Batch) -> dict[str, float]:
        """See `PairLoss.program_weights`."""
        return self._pair_loss.program_weights(batch)

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `PairLoss.program_loss`."""
        return self._pair_loss.program_loss(model, inputs)
