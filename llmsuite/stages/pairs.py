"""Preference rows as token ids: what the stages that learn from pairs of answers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.data.rows import Preference
from llmsuite.errors import UserError
from llmsuite.stages.answers import Answer, ended
from llmsuite.stages.base import DropCounts, Stage, StageContext


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt with two answers, as token ids. Both answers end with the end-of-sequence token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        """The chosen one, the rejected one."""
        return Answer(self.prompt, self.chosen), Answer(self.prompt, self.rejected)


class PairStage(Stage[Pair]):
    """Base of the stages that learn from pairs of answers."""

    row_kind = "preference"

    def __init__(self, section: Any, context: StageContext):
        super().__init__(section, context)
        self._max_length = context.recipe.data.max_length
        self._template = context.template()

    def make_samples(self, rows: Sequence[Preference], counts: DropCounts) -> list[Pair]:
        """Pairs whose answers differ and fit. Nothing is ever cut: a cut answer would not learn to end."""
        texts: list[str] = []
        kept: list[Preference] = []
        for number, row in enumerate(rows):
            if row.chosen.strip() == row.rejected.strip():
                counts.drop("with chosen equal to rejected")
            elif not row.chosen.strip() or not row.rejected.strip():
                counts.drop("with an empty answer")
            else:
                try:
                    prompt, chosen = self._template.split(row.prompt, row.chosen)
                    _, rejected = self._template.split(row.prompt, row.rejected)
                except UserError as error:
                    counts.bad(number, str(error))
                    continue
                texts += [prompt, chosen, rejected]
                kept.append(row)
        ids, eos = self.context.encode(texts), self.context.tokenizer.eos_id
        pairs = []
        for i in range(len(kept)):
            pair = Pair(ids[3 * i], ended(ids[3 * i + 1], eos), ended(ids[3 * i + 2], eos))
            if pair.chosen == pair.rejected:  # different texts, to a tokenizer that tells them not apart
                counts.drop("with chosen equal to rejected")
            elif not pair.prompt:
                counts.drop("with a prompt of no tokens (nothing would predict the answer)")
            elif pair.chosen.count(eos) > 1 or pair.rejected.count(eos) > 1:
                counts.drop("with the end-of-sequence token inside an answer")
            elif len(pair.prompt) >= self._max_length:
                counts.drop(f"with a prompt of {self._max_length} tokens or more (all masked)")
            elif max(map(len, pair.answers)) > self._max_length:
                counts.drop(f"longer than data.max_length {self._max_length} (the end of an answer would be cut off)")
            else:
                pairs.append(pair)
        return pairs

    def row_lengths(self, samples: Sequence[Pair]) -> np.ndarray:
        """[pairs, 2]."""
        return np.array([[len(answer) - 1 for answer in pair.answers] for pair in samples], dtype="int64")
