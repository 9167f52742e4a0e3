"""Preference rows as token ids: for the stages that train on pairs of answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.data.packing import packed
from llmsuite.data.rendered import same_answers
from llmsuite.data.rows import Preference, conversations_of
from llmsuite.errors import UserError
from llmsuite.stages.answers import Answer, ensure_eos
from llmsuite.train.stage import Batch, DropCounts, Stage, StageContext


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

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Itself, as the only pair of a sample."""
        return (self,)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A packed sample: pairs whose chosen answers share a row of a batch, and whose rejected ones share another."""

    pairs: tuple[Pair, ...]


class PairStage(Stage["Pair | Pairs"]):
    """Base of the stages that train on pairs of answers."""

    row_kind = "preference"
    row_by_row = True

    def __init__(self, section: Any, context: StageContext):
        super().__init__(section, context)
        self._max_length = context.recipe.data.max_length
        self._is_packed = context.recipe.data.packing == "best_fit"
        self._template = context.template()
        self._most_pairs = 1

    def make_samples(self, rows: Sequence[Preference], counts: DropCounts) -> list[Pair]:
        """Pairs whose answers differ and fit. Nothing is ever cut: the model would not learn to end a cut answer."""
        texts: list[tuple[str, str]] = []
        kept: list[int] = []
        template = self._template.ahead_of_splits(both for row in rows for both in conversations_of(row))
        for number, row in enumerate(rows):
            if same_answers(row):
                counts.drop("with chosen equal to rejected", number)
            elif row.chosen.is_empty or row.rejected.is_empty:
                counts.drop("with an empty answer", number)
            else:
                try:
                    texts += [template.split(conversation) for conversation in conversations_of(row)]
                    kept.append(number)
                except UserError as error:
                    counts.bad(number, str(error))
        encoded, eos = self.context.encode_answers(texts), self.context.tokenizer.eos_id
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

    def read(self, path: Path) -> Sequence[Pair | Pairs]:
        """The pairs of a file, or packs of them."""
        samples = super().read(path)
        if not self._is_packed:
            return samples
        packs, filled = packed(samples, self.row_lengths, self._max_length, join)
        self.context.report(f"{path}: packed into {len(packs)} samples, which are {filled:.1%} full")
        self._most_pairs = max(self._most_pairs, packs.most)
        return packs

    def places(self, one_row: bool) -> Batch:
        """How many places for answers a row has in a program, as a part of a batch of packed rows: as many as any row
        that was read needs, so that batches have one shape. Nothing with `one_row`, as programs have none of these."""
        return {"pairs_per_row": self._most_pairs} if self._is_packed and not one_row else {}

    def row_lengths(self, samples: Sequence[Pair | Pairs]) -> np.ndarray:
        """[samples, 2]: lengths of the row of chosen answers and of the row of rejected ones."""
        rows = chosen_then_rejected(samples)
        lengths = [sum(len(answer) - 1 for answer in row) for row in rows]
        return np.array(lengths, dtype="int64").reshape(2, len(samples)).T


def join(samples: Sequence[Pair | Pairs]) -> Pairs:
    """One sample with the pairs of several."""
    return Pairs(tuple(pair for sample in samples for pair in sample.pairs))


def chosen_then_rejected(samples: Sequence[Pair | Pairs]) -> list[list[Answer]]:
    """Rows of a batch: the chosen answers of each sample in the first half, the rejected ones in the second."""
    return [[pair.answers[side] for pair in sample.pairs] for side in (0, 1) for sample in samples]


def side_by_side(rows: np.ndarray) -> np.ndarray:
    """Rows of P chosen answers, then those of P rejected ones, to rows in which the rejected answer follows the chosen
    one: programs cut rows over ranks, and a pair stays together so."""
    return np.stack(np.split(rows, 2), 1).reshape(rows.shape)
