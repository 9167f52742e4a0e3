"""Supervised fine-tuning on the assistant's turns of conversations, each given everything before it.

rows -> text before and after each supervised turn -> token ids with a loss mask on those turns -> next-token loss
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.data.packing import packed
from llmsuite.data.rendered import has_answers
from llmsuite.data.rows import Conversation
from llmsuite.errors import UserError
from llmsuite.stages import language_model
from llmsuite.stages.language_model import WeightedTokens
from llmsuite.stages.sections import SftSection
from llmsuite.train.stage import Batch, DropCounts, LossTerms, Question, Stage, StageContext
from llmsuite.typing import Tensor


class Unusable(Exception):
    """A conversation that would train nothing, or the wrong thing, with the reason."""


class SftStage(Stage[WeightedTokens]):
    """Makes the assistant's turns likelier, each up to and including its end-of-sequence token."""

    row_kind = "conversation"
    row_by_row = True

    def __init__(self, section: SftSection, context: StageContext):
        super().__init__(section, context)
        self._truncate, self._max_length = section.truncate, context.recipe.data.max_length
        self._is_packed = context.recipe.data.packing == "best_fit"
        self._template = context.template()
        self._mtp_weight = context.recipe.train.mtp_loss_weight
        self._tells_prompts = context.recipe.reft.rank is not None

    def make_samples(self, rows: Sequence[Conversation], counts: DropCounts) -> list[WeightedTokens]:
        """The conversations that fit. Raises UserError with the line that the chat template cannot render."""
        turns: list[list[tuple[str, str]]] = []
        rendered: list[tuple[int, Conversation]] = []
        template = self._template.ahead_of_turns(filter(has_answers, rows))
        for number, row in enumerate(rows):
            try:
                turns.append(template.supervised_turns(row) if has_answers(row) else [])
                rendered.append((number, row))
            except UserError as error:
                counts.bad(number, str(error))
        encoded = iter(self.context.encode_answers([texts for row in turns for texts in row]))
        samples = []
        for (number, row), texts in zip(rendered, turns):
            parts = [next(encoded) for _ in texts]
            try:
                if not has_answers(row):
                    raise Unusable("with no supervised turn of the assistant, or an empty one")
                sample = self._join(parts)
                if len(sample.ids) > self._max_length:
                    sample = self._cut(sample)
                    counts.cut += 1
                samples.append(sample)
            except Unusable as reason:
                counts.drop(str(reason), number)
        return samples

    def _join(self, encoded: Sequence[tuple[list[int], list[int]]]) -> WeightedTokens:
        """One sequence from the ids before each supervised turn and those of the turn."""
        ids: list[int] = []
        weights: list[int] = []
        for i, (before, answer) in enumerate(encoded):
            if not before:
                raise Unusable("with nothing before the first answer (no token would predict it)")
            if (
                before[: len(ids)] != ids
            ):  # longer tokens span its borders, so the model would not be shown it like this
                raise Unusable("with an answer that is tokenized differently once the conversation goes on")
            answer = self._end(answer, is_last=i == len(encoded) - 1)
            weights += [0] * (len(before) - len(ids)) + [1] * len(answer)
            ids = before + answer
        return WeightedTokens(np.array(ids, dtype="int32"), np.array(weights, dtype="float32"))

    def _end(self, answer: list[int], is_last: bool) -> list[int]:
        """The answer up to and with its end-of-sequence token; what a template puts behind that is dropped.

        A template may close turns with a mark of its own: then the mark is kept, and the last turn gets the
        end-of-sequence token too.
        """
        eos = self.context.tokenizer.eos_id
        if answer.count(eos) > 1:
            raise Unusable("with the end-of-sequence token inside an answer")
        if eos in answer:
            return answer[: answer.index(eos) + 1]
        return [*answer, eos] if is_last else answer

    def _cut(self, sample: WeightedTokens) -> WeightedTokens:
        """The first `max_length` tokens, if `sft.truncate` is set."""
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
        packs, filled = packed(samples, self.row_lengths, self._max_length, language_model.join)
        self.context.report(f"{path}: packed into {len(packs)} samples, which are {filled:.1%} full")
        return packs

    def row_lengths(self, samples: Sequence[WeightedTokens]) -> np.ndarray:
        """[samples, 1]."""
        return np.array([[sample.num_inputs] for sample in samples], dtype="int64")

    def collate(self, samples: Sequence[WeightedTokens]) -> Batch:
        """Padding on the right, or all in one row."""
        samples = [language_model.join(samples)] if self.context.padding_free else samples
        pad_id, multiple = self.context.tokenizer.pad_id, self.context.length_multiple
        return language_model.collate(samples, pad_id, multiple, self._mtp_weight > 0, self._tells_prompts)

    def questions(self, sample: WeightedTokens) -> Sequence[Question]:
        """The last answer of each conversation in a sample, and everything before it."""
        found = []
        for begin, end in itertools.pairwise([*sample.begins, len(sample.ids)]):
            ids, (supervised,) = sample.ids[begin:end].tolist(), np.nonzero(sample.weights[begin:end])
            breaks = np.flatnonzero(np.diff(supervised) > 1)
            first = int(supervised[breaks[-1] + 1 if len(breaks) else 0])
            found.append(Question(tuple(ids[:first]), tuple(ids[first : supervised[-1] + 1])))
        return found

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the supervised tokens; every one weighs 1."""
        return language_model.weighted_loss(model, batch, self._mtp_weight)

    def program_inputs(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """Ids, targets and weights, [B, length]."""
        return language_model.program_inputs(batch, length, self._is_packed)

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over the tokens; those that are not supervised weigh 0."""
        return language_model.program_loss(model, inputs)
