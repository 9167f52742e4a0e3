"""Preference rows as token ids, for the stages that train on pairs of answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.data.render_checks import same_answers
from llmsuite.data.rows import Preference, conversations_of
from llmsuite.engine.row_reader import PackingReader
from llmsuite.engine.stage import DropCounts, Stage, StageContext
from llmsuite.stages.answers import Answer, ensure_eos


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt with two answers, as token ids. Both answers end with the end-of-sequence token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        """The chosen and the rejected answer."""
        return Answer(self.prompt, self.chosen), Answer(self.prompt, self.rejected)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The pair itself, as the only one of its sample."""
        return (self,)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A packed sample: pairs whose chosen answers share a row of a batch, and whose rejected answers share another."""

    pairs: tuple[Pair, ...]


class PairStage(Stage["Pair | Pairs"]):
    """Base of the stages that train on pairs of answers."""

    row_kind = "preference"
    row_by_row = True

    def __init__(self, section: Any, context: StageContext):
        super().__init__(section, context)
        self._max_length = context.data.max_length
        self._is_packed = context.data.packing == "best_fit"
        self._template = context.template()
        if self._is_packed:
            self.reader = PackingReader(self, self._max_length, join)

    def make_samples(self, rows: Sequence[Preference], counts: DropCounts) -> list[Pair]:
        """Pairs whose answers differ and fit. Nothing is truncated: the model would not learn to end a truncated
        answer."""
        texts: list[tuple[str, str]] = []
        kept: list[int] = []
        template = self._template.prerender_splits(both for row in rows for both in conversations_of(row))
        for number, row in enumerate(rows):
            if same_answers(row):
                counts.drop("with chosen equal to rejected", number)
            elif row.chosen.is_empty or row.rejected.is_empty:
                counts.drop("with an empty answer", number)
            else:
                try:
                    texts += template.splits(conversations_of(row))
                    kept.append(number)
                except UserError as error:
                    counts.bad(number, str(error))
        encoded = self.context.encode_answers(texts)
        eos = self.context.tokenizer.eos_id
        pairs = []
        for number, (prompt, chosen), (_, rejected) in zip(kept, encoded[::2], encoded[1::2]):
            pair = Pair(prompt, ensure_eos(chosen, eos), ensure_eos(rejected, eos))
            if pair.chosen == pair.rejected:  # different texts, but the tokenizer maps them to the same ids
                counts.drop("with chosen equal to rejected", number)
            elif not pair.prompt:
                counts.drop("with a prompt of no tokens (nothing would predict the answer)", number)
            elif pair.chosen.count(eos) > 1 or pair.rejected.count(eos) > 1:
                counts.drop("with the end-of-sequence token inside an answer", number)
            elif len(pair.prompt) >= self._max_length:
                counts.drop(f"with a prompt of {self._max_length} tokens or more (all masked)", number)
            elif max(map(len, pair.answers)) > self._max_length:
                reason = f"longer than data.max_length {self._max_length} (the end of an answer would be cut off)"
                counts.drop(reason, number)
            else:
                pairs.append(pair)
        return pairs

    @property
    def _slots(self) -> int:
        """`BatchLayout.slots`: the maximum over all rows that were read, so that all batches have the same shape."""
        return self.reader.max_pack_size if isinstance(self.reader, PackingReader) else 0

    def row_lengths(self, samples: Sequence[Pair | Pairs]) -> np.ndarray:
        """Lengths of the row of chosen answers and of the row of rejected answers, [samples, 2]."""
        rows = chosen_then_rejected(samples)
        lengths = [sum(map(len, row)) - len(row) for row in rows]
        return np.array(lengths, dtype="int64").reshape(2, len(samples)).T


def join(samples: Sequence[Pair | Pairs]) -> Pairs:
    """Concatenate samples to one with the pairs of all."""
    return Pairs(tuple(pair for sample in samples for pair in sample.pairs))


def chosen_then_rejected(samples: Sequence[Pair | Pairs]) -> list[list[Answer]]:
    """Rows of a batch: the chosen answers of each sample in the first half, the rejected answers in the second."""
    rows = []
    for side in (0, 1):
        for sample in samples:
            rows.append([pair.answers[side] for pair in sample.pairs])
    return rows
