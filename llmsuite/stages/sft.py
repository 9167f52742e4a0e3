"""Supervised fine-tuning: the assistant's turns of conversations are learnt, given everything before them.

rows -> text before and behind each learnt turn -> token ids with a weight of 1 on those turns -> next-token loss
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.data.rows import Conversation
from llmsuite.errors import UserError
from llmsuite.stages import language_model
from llmsuite.stages.language_model import WeightedTokens
from llmsuite.stages.sections import SftSection
from llmsuite.train.stage import Batch, DropCounts, LossTerms, Stage, StageContext


class Unusable(Exception):
    """A conversation that would train nothing, or the wrong thing; says which kind it is."""


class SftStage(Stage[WeightedTokens]):
    """Makes the assistant's turns likelier, each up to and including its end-of-sequence token."""

    row_kind = "conversation"

    def __init__(self, section: SftSection, context: StageContext):
        super().__init__(section, context)
        self._truncate, self._max_length = section.truncate, context.recipe.data.max_length
        self._is_packed = context.recipe.data.packing == "best_fit"
        self._template = context.template()

    def make_samples(self, rows: Sequence[Conversation], counts: DropCounts) -> list[WeightedTokens]:
        """The conversations that fit. Raises UserError with the line that the chat template cannot say."""
        turns: list[list[tuple[str, str]]] = []
        said: list[Conversation] = []
        for number, row in enumerate(rows):
            try:
                turns.append(self._template.learnt_turns(row) if _answers(row) else [])
                said.append(row)
            except UserError as error:
                counts.bad(number, str(error))
        encoded = iter(self._encode([texts for row in turns for texts in row]))
        samples = []
        for row, texts in zip(said, turns):
            parts = [next(encoded) for _ in texts]
            try:
                if not _answers(row):
                    raise Unusable("with no turn of the assistant to learn, or an empty one")
                sample = self._join(parts)
                if len(sample.ids) > self._max_length:
                    sample = self._cut(sample)
                    counts.cut += 1
                samples.append(sample)
            except Unusable as reason:
                counts.drop(str(reason))
        if counts.cut:
            self.context.report(f"{counts.path}: {counts.cut} rows are cut to data.max_length {self._max_length}")
        return samples

    def _encode(self, turns: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Ids of the prompt and of the answer, of texts before and behind each turn."""
        ids = self.context.encode([text for turn in turns for text in turn])
        both = list(zip(ids[::2], ids[1::2]))
        # Where a token reaches over the border: whoever asks will encode the prompt alone, so the answer is, too.
        crossed = [after[: len(before)] != before for before, after in both]
        alone = iter(self.context.encode([t[len(prompt) :] for (prompt, t), is_so in zip(turns, crossed) if is_so]))
        return [
            (before, next(alone) if is_so else after[len(before) :]) for (before, after), is_so in zip(both, crossed)
        ]

    def _join(self, encoded: Sequence[tuple[list[int], list[int]]]) -> WeightedTokens:
        """One sequence of the ids of what is before each turn, and of the turn."""
        ids: list[int] = []
        weights: list[int] = []
        for i, (before, answer) in enumerate(encoded):
            if not before:
                raise Unusable("with nothing before the first answer (no token would predict it)")
            if before[: len(ids)] != ids:  # its borders vanish in longer tokens, so it would not be shown like this
                raise Unusable("with an answer that is tokenized differently once the conversation goes on")
            answer = self._end(answer, is_last=i == len(encoded) - 1)
            weights += [0] * (len(before) - len(ids)) + [1] * len(answer)
            ids = before + answer
        return WeightedTokens(np.array(ids, dtype="int32"), np.array(weights, dtype="float32"))

    def _end(self, answer: list[int], is_last: bool) -> list[int]:
        """The answer up to its end-of-sequence token, which is learnt; what a template puts behind it is not.

        A template may close turns with a mark of its own: then that is learnt, and the end of the sequence behind
        the last turn.
        """
        eos = self.context.tokenizer.eos_id
        if answer.count(eos) > 1:
            raise Unusable("with the end-of-sequence token inside an answer")
        if eos in answer:
            return answer[: answer.index(eos) + 1]
        return [*answer, eos] if is_last else answer

    def _cut(self, sample: WeightedTokens) -> WeightedTokens:
        """The first `max_length` tokens, if that is wanted."""
        if not self._truncate:
            raise Unusable(f"longer than data.max_length {self._max_length} (sft.truncate is false)")
        ids, weights = sample.ids[: self._max_length], sample.weights[: self._max_length]
        if not weights.any():
            raise Unusable(f"with no answer within data.max_length {self._max_length}")
        return WeightedTokens(ids, weights)

    def read(self, path: Path) -> Sequence[WeightedTokens]:
        """The conversations of a file, or packs of them."""
        samples = super().read(path)
        if not self._is_packed:
            return samples
        packs = language_model.pack(samples, self._max_length)
        filled = sum(pack.num_inputs for pack in packs) / (len(packs) * self._max_length)
        self.context.report(f"{path}: packed into {len(packs)} samples, which are {filled:.1%} full")
        return packs

    def row_lengths(self, samples: Sequence[WeightedTokens]) -> np.ndarray:
        """[samples, 1]."""
        return np.array([[sample.num_inputs] for sample in samples], dtype="int64")

    def collate(self, samples: Sequence[WeightedTokens]) -> Batch:
        """Padding on the right, or all in one row."""
        samples = [language_model.join(samples)] if self.context.padding_free else samples
        return language_model.collate(samples, self.context.tokenizer.pad_id, self.context.length_multiple)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the learnt tokens; every one weighs 1."""
        return language_model.weighted_loss(model, batch)


def _answers(row: Conversation) -> bool:
    """Whether there is a turn to learn, and none of them says nothing."""
    learnt = [message for message, is_supervised in zip(row.messages, row.learnt) if is_supervised]
    return bool(learnt) and all(message.content.strip() or message.tool_calls for message in learnt)
