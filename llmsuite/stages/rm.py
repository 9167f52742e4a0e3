"""Reward model: one score an answer, higher for the better of two (Ouyang et al. 2022, arXiv 2203.02155).

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> score of the last token
of each, its end of sequence -> loss of the difference

Shapes: P pairs, A = 2 P answers (chosen first), L length, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.stages.answers import Slots, pack_inputs
from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.pairs import Pair, Pairs, PairStage, chosen_then_rejected, side_by_side
from llmsuite.stages.preference_losses import bradley_terry
from llmsuite.stages.sections import RmSection
from llmsuite.train.stage import Batch, LossTerms, StageContext
from llmsuite.typing import Tensor


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
            **self.places(one_row),
        }

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs; every pair weighs 1."""
        last = hidden_at_positions(model, batch)  # [A, D]
        chosen, rejected = model.scores(last).split(2)
        losses, observed = self._compare(chosen, rejected)
        num_pairs = batch["weight"]
        sums = {name: (value.detach().sum(), num_pairs) for name, value in observed.items()}
        return LossTerms(losses.sum(), num_pairs, self._profile.checked(sums))

    def _compare(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [P] to losses and metrics, [P] each."""
        losses = bradley_terry(chosen, rejected, self._margin)
        if self._centering:
            losses = losses + self._centering * (chosen + rejected).square()
        return losses, {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": (chosen > rejected).astype("float32"),
        }

    def program_inputs(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """Ids and, counted from 1, the answers of a row at their last tokens, 0 elsewhere, [A, length], and lengths
        [A], each pair side by side; the weights of the pairs, [P]. Of packed rows also where documents begin, and
        "slots"; weights are [P, S], P being the rows of chosen answers."""
        ids = batch["input_ids"]
        at, wider = np.divmod(batch["positions"], ids.shape[1]), [(0, 0), (0, length - ids.shape[1])]
        last, weights = np.zeros([len(ids), length], "float32"), np.ones(len(ids) // 2, "float32")
        last[at] = 1
        found = {"input_ids": np.pad(ids, wider), "last": last}  # nothing sees what is behind it
        found["row_lengths"] = np.asarray(batch["lengths"], "int64")
        if "pairs_per_row" in batch:
            slots = Slots.of(at[0], len(ids), batch["pairs_per_row"])
            last[at] += np.arange(len(at[0])) - slots.answers[at[0], 0]
            starts = batch.get("document_starts", np.zeros_like(ids))
            found |= {"document_starts": np.pad(starts, wider, "edge"), "slots": slots.numbers}
            weights = np.split(slots.is_taken, 2)[0]
        return {**{name: side_by_side(array) for name, array in found.items()}, "weights": weights}

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over the pairs."""
        starts = {"document_starts": inputs["document_starts"]} if "document_starts" in inputs else {}
        hidden, _ = model.hidden_states(inputs["input_ids"], **starts)  # [A, L, D]
        is_last = inputs["last"].unsqueeze(1)  # [A, S, L]
        if "slots" in inputs:
            is_last = is_last == inputs["slots"].unsqueeze(-1)
        # [A, S, D]; a program cannot pick some, and Paddle 3.3.1 places no 16-bit ones and zeros in it
        picked = paddle.matmul(is_last.astype("float32"), hidden.astype("float32")).astype(hidden.dtype)
        scores, weights = model.scores(picked), inputs["weights"]
        chosen, rejected = (scores.reshape([-1, 2, *weights.shape[1:]])[:, side] for side in (0, 1))
        losses, observed = self._compare(chosen, rejected)
        sums = {name: (value.detach() * weights).sum() for name, value in observed.items()}
        return {"loss": (losses * weights).sum(), **self._profile.checked(sums)}
