"""Preference rows as token ids, for the stages that train on pairs of answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.data.render_checks import same_answers
from llmsuite.data.rows import Preference, Ranking, conversations_of
from llmsuite.engine.row_reader import PackingReader
from llmsuite.engine.stage import DropCounts, Stage, StageContext
from llmsuite.stages.answers import Answer, ended


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt with two answers, as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float | None = None
    """Margin as in `Preference`."""

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
        self._is_packed = context.data.packing != "none"
        self._ranked_pairs = context.data.ranked_pairs
        self._template = context.template()
        if self._is_packed:
            self.reader = PackingReader(self, context.data.longest_sample, join)

    def make_samples(self, rows: Sequence[Preference | Ranking], counts: DropCounts) -> list[Pair]:
        """Pairs whose answers differ and fit. Nothing is truncated: the model would not learn to end a truncated
        answer.

        A row with ranked answers has several pairs; those that cannot be used are left out of it, and it is dropped
        where none is left.
        """
        candidates = [(number, pair) for number, row in enumerate(rows) for pair in self._pairs_of(row)]
        texts: list[tuple[str, str]] = []
        kept: list[tuple[int, Preference]] = []
        reasons = _Reasons(rows, counts)
        template = self._template.prerender_splits(both for _, pair in candidates for both in conversations_of(pair))
        for number, pair in candidates:
            if same_answers(pair):
                reasons.add(number, "with chosen equal to rejected")
            elif pair.chosen.is_empty or pair.rejected.is_empty:
                reasons.add(number, "with an empty answer")
            else:
                try:
                    texts += template.splits(conversations_of(pair))
                    kept.append((number, pair))
                except UserError as error:
                    reasons.add_fault(number, str(error))
        encoded = self.context.encode_answers(texts)
        pairs = []
        for (number, row), (prompt, chosen), (_, rejected) in zip(kept, encoded[::2], encoded[1::2]):
            pair_ids = self._pair(row, prompt, chosen, rejected)
            if isinstance(pair_ids, str):
                reasons.add(number, pair_ids)
            elif number not in reasons.faulty:
                pairs.append(pair_ids)
                reasons.add_sample(number)
        reasons.finish()
        return pairs

    def _pairs_of(self, row: Preference | Ranking) -> list[Preference]:
        return row.pairs(self._ranked_pairs) if isinstance(row, Ranking) else [row]

    def _pair(self, row: Preference, prompt: list[int], chosen: list[int], rejected: list[int]) -> Pair | str:
        """The pair of a row as token ids, or the reason why it cannot be used."""
        eos = self.context.tokenizer.eos_id
        end = self.context.data.end_of_answer
        pair = Pair(prompt, ended(chosen, eos, end), ended(rejected, eos, end), row.margin)
        if pair.chosen == pair.rejected:  # different texts, but the tokenizer maps them to the same ids
            return "with chosen equal to rejected"
        if not pair.prompt:
            return "with a prompt of no tokens (nothing would predict the answer)"
        if pair.chosen.count(eos) > 1 or pair.rejected.count(eos) > 1:
            return "with the end-of-sequence token inside an answer"
        if len(pair.prompt) >= self._max_length:
            return f"with a prompt of {self._max_length} tokens or more (all masked)"
        if max(map(len, pair.answers)) > self._max_length:
            return f"longer than data.max_length {self._max_length} (the end of an answer would be cut off)"
        return pair

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


class _Reasons:
    """Counts of the rows and pairs that are not used."""

    def __init__(self, rows: Sequence[Preference | Ranking], counts: DropCounts):
        self._rows = rows
        self._counts = counts
        self.faulty: set[int] = set()
        """Numbers of the rows that the template refuses."""
        self._sample_rows: list[int] = []
        """For each sample, the number of its row."""

    def add(self, number: int, reason: str) -> None:
        """Count a pair of row `number` that cannot be used."""
        if isinstance(self._rows[number], Ranking):
            self._counts.leave_out(reason)
        else:
            self._counts.drop(reason, number)

    def add_fault(self, number: int, reason: str) -> None:
        """Count a row as faulty, once. Raises UserError unless faulty rows are skipped."""
        if number not in self.faulty:
            self.faulty.add(number)
            self._counts.bad(number, reason)

    def add_sample(self, number: int) -> None:
        """Count a pair of row `number` that is used."""
        self._sample_rows.append(number)

    def finish(self) -> None:
        """Count the rows with ranked answers of which nothing is used."""
        ranked = {number for number, row in enumerate(self._rows) if isinstance(row, Ranking)}
        if not ranked:
            return
        self._counts.sample_rows = self._sample_rows
        used = ranked.intersection(self._sample_rows)
        for number in sorted(ranked - used - self.faulty):
            self._counts.drop("with ranked answers that make no pair", number)
        self._counts.num_ranked += len(used)
        self._counts.num_pairs += sum(number in ranked for number in self._sample_rows)
