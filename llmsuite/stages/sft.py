"""Supervised fine-tuning on the assistant's turns of conversations, each conditioned on all earlier turns, or on plain
text.

rows -> text before and after each supervised turn -> token ids with a loss mask on those turns -> next-token loss
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.encoding import encode_apart
from llmsuite.data.plain_text import plain_texts
from llmsuite.data.render_checks import has_answers
from llmsuite.data.rows import Conversation
from llmsuite.engine.row_reader import PackingReader
from llmsuite.engine.stage import Batch, BatchLayout, DropCounts, EvalPrompt, GeneratingStage, LossTerms, StageContext
from llmsuite.stages import language_model
from llmsuite.stages.language_model import WeightedTokens


class Unusable(Exception):
    """The reason for which a conversation cannot be trained on."""


class CutsConversations(Protocol):
    """The part of a stage's section that decides whether long conversations are cut."""

    truncate: bool


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as texts."""

    number: int
    """Number of its row, from 0."""
    row: Conversation
    turns: list[tuple[str, str]]
    """The text before each supervised turn, and that text with the turn; none for a row without answers."""
    weights: list[float]
    """Weight of each of these turns."""
    thoughts: list[tuple[str, str] | None]
    """`ChatTemplate.thought_texts` of the turns, where thoughts are not supervised."""
    is_forgetful: bool = False
    """True where the template leaves out the thoughts of some turn."""
    whole: str | None = None
    """The text of all turns, with what the template writes after the last answer; None where that is left out."""


class SftStage(GeneratingStage[WeightedTokens]):
    """Trains on the assistant's turns, each with the tokens that end it; the last one ends with an end-of-sequence
    token, unless the chat template marks what is supervised."""

    row_kind = "conversation"
    row_by_row = True
    truncate_key: ClassVar[str] = "sft.truncate"
    """Key of the recipe that decides whether long conversations are cut."""

    def __init__(self, section: CutsConversations, context: StageContext):
        super().__init__(section, context)
        self._truncate = section.truncate
        self._max_length = context.data.max_length
        self._is_packed = context.data.packing != "none"
        self._answers_apart = context.data.answer_tokens == "apart"
        self._ends_by_template = context.data.end_of_answer == "template"
        self._keeps_text = context.data.end_of_answer == "token_in_text"
        self._supervises_thoughts = context.data.supervise_thoughts
        self._mtp_weight = context.train.mtp_loss_weight
        self._has_prompt_lengths = context.reft.rank is not None
        if self._is_packed:
            self.reader = PackingReader(self, context.data.longest_sample, language_model.join)

    @functools.cached_property
    def _bos_id(self) -> int | None:
        """Id of the begin token; None where the tokenizer has none."""
        tokenizer = self.context.tokenizer
        bos = tokenizer.special_tokens.get("bos_token")
        return None if bos is None else tokenizer.token_id(bos)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        """The chat template, which rows of plain text do not need."""
        return self.context.template()

    def make_samples(self, rows: Sequence[Conversation], counts: DropCounts) -> list[WeightedTokens]:
        """The conversations that fit. A row that the chat template cannot render is counted as a bad one, which raises
        UserError with its line unless bad rows are to be skipped."""
        rendered: list[Rendered] = []
        template = self._prerendered(rows)
        for number, row in enumerate(rows):
            try:
                rendered.append(self._rendered(template, number, row))
                counts.forgetful += rendered[-1].is_forgetful
            except UserError as error:
                counts.bad(number, str(error))
        encoded = iter(self._encoded([texts for each in rendered for texts in each.turns]))
        thoughts = [text for each in rendered for texts in each.thoughts for text in texts or ()]
        unsupervised = iter(self.context.encode(thoughts))
        wholes = iter(self.context.encode([each.whole for each in rendered if each.whole is not None]))
        samples = []
        for each in rendered:
            parts = [next(encoded) for _ in each.turns]
            borders = [(next(unsupervised), next(unsupervised)) for span in each.thoughts if span is not None]
            whole = None if each.whole is None else next(wholes)
            try:
                sample = self._sample(each, parts, borders)
                if whole is not None:
                    sample = _with_rest(sample, whole)
                if len(sample.ids) > self._max_length:
                    sample = self._cut(sample)
                    counts.cut += 1
                samples.append(sample)
            except Unusable as reason:
                counts.drop(str(reason), each.number)
        return samples

    def _prerendered(self, rows: Sequence[Conversation]) -> ChatTemplate | None:
        """The chat template with all that `_rendered` needs; None where no row needs a template, as the tokenizer may
        have none."""
        turns = [row for row in rows if not row.is_plain]
        if not turns:
            return None
        return self._template.prerender_turns(filter(has_answers, turns))

    def _encoded(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """The token ids before each supervised turn and those of the turn, from `Rendered.turns`."""
        if not self._answers_apart:
            return self.context.encode_answers(texts)
        parts = [part for before, text in texts for part in (before, text[len(before) :])]
        ids = encode_apart(parts, self.context.tokenizer, self.context.encode)
        return list(zip(ids[::2], ids[1::2]))

    def _rendered(self, template: ChatTemplate | None, number: int, row: Conversation) -> Rendered:
        """The texts of row `number`. Raises UserError when the template refuses it."""
        if self._answers_apart and row.is_plain:
            return Rendered(number, row, [plain_texts(row)], [1.0], [])
        if not has_answers(row):
            return Rendered(number, row, [], [], [])
        if row.is_plain:
            return Rendered(number, row, [plain_texts(row)], [1.0], [])
        assert template is not None
        turns = template.supervised_turns(row)
        weights = [1.0] * len(turns)
        if row.weights:
            weights = [row.weight(i) for i in template.numbers_of(row, turns)]
        thoughts = [] if self._supervises_thoughts else template.thought_texts(row, turns)
        whole = template.render(row.messages, tools=row.tools, kwargs=row.template_kwargs) if self._keeps_text else None
        return Rendered(number, row, turns, weights, thoughts, bool(template.dropped_thoughts(row)), whole)

    def _sample(
        self,
        rendered: Rendered,
        parts: Sequence[tuple[list[int], list[int]]],
        borders: Sequence[tuple[list[int], list[int]]],
    ) -> WeightedTokens:
        """The sample of a conversation. Raises Unusable.

        Args:
            rendered: its texts.
            parts: the token ids before each supervised turn and those of the turn.
            borders: of `_mask_thoughts`.
        """
        if not parts:
            raise Unusable("with no supervised turn of the assistant, or an empty one")
        if rendered.row.is_plain and self._answers_apart:
            return self._apart(*parts[0])
        if rendered.row.is_plain:
            return self._plain(*parts[0])
        return _mask_thoughts(self._join(parts, rendered.weights), borders)

    def _plain(self, prompt: list[int], answer: list[int]) -> WeightedTokens:
        """One sequence of plain text, with the special tokens that the tokenizer puts in front of a text, as in a
        prompt of generation, and the end-of-sequence token after it. A first token is not supervised."""
        eos = self.context.tokenizer.eos_id
        if prompt and eos in answer[:-1]:  # a whole text may have documents of its own
            raise Unusable("with the end-of-sequence token inside an answer")
        ids = self.context.tokenizer.with_special_tokens([*prompt, *answer])
        begin = len(ids) - len(answer)
        if answer[-1:] != [eos]:
            ids.append(eos)
        weights = np.zeros(len(ids), dtype="float32")
        weights[max(begin, 1) :] = 1
        if not weights.any():
            raise Unusable("with a single token (no token would predict it)")
        return WeightedTokens(np.array(ids, dtype="int32"), weights)

    def _apart(self, prompt: list[int], answer: list[int]) -> WeightedTokens:
        """One sequence of two texts that are tokenized apart, as `InstructionPromptTokenizingStrategy` of Axolotl:
        each with the special tokens that the tokenizer puts around a text and cut to `data.max_length`, the second one
        without the begin token and with the end-of-sequence token. A row without an answer has only its prompt."""
        eos = self.context.tokenizer.eos_id
        prefix, suffix = self.context.tokenizer.affixes
        ids = [*prefix, *prompt, *suffix][: self._max_length] if prompt else []
        begin = len(ids)
        if answer:
            answer = [*prefix, *answer, *suffix][: self._max_length]
            if answer[-1] != eos and len(answer) < self._max_length:
                answer.append(eos)
            ids += answer[1:] if answer[0] == self._bos_id else answer
        if len(ids) < 2:
            raise Unusable("with a single token (no token would predict it)")
        weights = np.zeros(len(ids), dtype="float32")
        weights[max(begin, 1) :] = 1
        return WeightedTokens(np.array(ids, dtype="int32"), weights)

    def _join(self, encoded: Sequence[tuple[list[int], list[int]]], turn_weights: Sequence[float]) -> WeightedTokens:
        """One sequence, from the token ids before each supervised turn and those of the turn, and its weights."""
        ids: list[int] = []
        weights: list[float] = []
        for i, ((before, answer), weight) in enumerate(zip(encoded, turn_weights)):
            if not before:
                raise Unusable("with nothing before the first answer (no token would predict it)")
            # the conversation up to an answer has to be a prefix of the next one, else a token spans the border, and
            # the model would get other tokens in generation than in training
            if before[: len(ids)] != ids:
                raise Unusable("with an answer that is tokenized differently when the conversation continues")
            answer = self._end(answer, is_last=i == len(encoded) - 1)
            weights += [0] * (len(before) - len(ids)) + [weight] * len(answer)
            ids = before + answer
        return WeightedTokens(np.array(ids, dtype="int32"), np.array(weights, dtype="float32"))

    def _end(self, answer: list[int], is_last: bool) -> list[int]:
        """The answer up to and including its end-of-sequence token. Tokens that a template appends after it are
        dropped.

        A template may end turns with another token. That token is kept, and the last turn also gets the end-of-sequence
        token, unless the template marks what is supervised. With `data.end_of_answer` template the answer stays as the
        template writes it; with token_in_text no token is appended. Raises Unusable.
        """
        eos = self.context.tokenizer.eos_id
        if answer.count(eos) > 1:
            raise Unusable("with the end-of-sequence token inside an answer")
        if self._ends_by_template:
            return answer
        if eos in answer:
            return answer[: answer.index(eos) + 1]
        if self._template.has_marks:
            return answer
        if self._keeps_text:
            raise Unusable("with an answer that the chat template does not end with the end-of-sequence token")
        return [*answer, eos] if is_last else answer

    def _cut(self, sample: WeightedTokens) -> WeightedTokens:
        """The first `data.max_length` tokens. Raises Unusable unless `truncate_key` is set."""
        if not self._truncate:
            raise Unusable(f"longer than data.max_length {self._max_length} ({self.truncate_key} is false)")
        ids = sample.ids[: self._max_length]
        weights = sample.weights[: self._max_length]
        if not weights.any():
            raise Unusable(f"with no answer within data.max_length {self._max_length}")
        return dataclasses.replace(sample, ids=ids, weights=weights)

    def row_lengths(self, samples: Sequence[WeightedTokens]) -> np.ndarray:
        """The length of each sample in a row, [samples, 1]."""
        return np.array([[sample.num_inputs] for sample in samples], dtype="int64")

    def collate(self, samples: Sequence[WeightedTokens]) -> Batch:
        """A batch with padding on the right, or with all samples in one row."""
        samples = [language_model.join(samples)] if self.context.padding_free else samples
        pad_id = self.context.tokenizer.pad_id
        multiple = self.context.length_multiple
        return language_model.collate(samples, pad_id, multiple, self._mtp_weight > 0, self._has_prompt_lengths)

    def eval_prompts(self, sample: WeightedTokens) -> Sequence[EvalPrompt]:
        """For each conversation of a sample, its last answer and the tokens before it."""
        prompts = []
        for begin, end in itertools.pairwise([*sample.begins, len(sample.ids)]):
            ids = sample.ids[begin:end].tolist()
            (supervised,) = np.nonzero(sample.weights[begin:end])
            if not len(supervised):
                continue
            breaks = np.flatnonzero(np.diff(supervised) > 1)
            last_turn = breaks[-1] + 1 if len(breaks) else 0
            first = int(supervised[last_turn])
            prompts.append(EvalPrompt(tuple(ids[:first]), tuple(ids[first : supervised[-1] + 1])))
        return prompts

    @property
    def batch_layout(self) -> BatchLayout:
        return BatchLayout(tokens=["weights"], has_documents=self._is_packed)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the supervised tokens, each with the weight of its turn."""
        return language_model.weighted_loss(model, batch, self._mtp_weight, is_dft=self.section.loss == "dft")


def _with_rest(sample: WeightedTokens, whole: Sequence[int]) -> WeightedTokens:
    """The sample with the tokens of its conversation that follow the last answer, without weight. Raises Unusable if
    the answer has other tokens there.

    Args:
        sample: of a conversation.
        whole: token ids of all that the chat template writes for it.
    """
    length = len(sample.ids)
    if sample.ids.tolist() != list(whole[:length]):
        raise Unusable("with an answer that is tokenized differently when the conversation continues")
    weights = np.zeros(len(whole), dtype="float32")
    weights[:length] = sample.weights
    return dataclasses.replace(sample, ids=np.array(whole, dtype="int32"), weights=weights)


def _mask_thoughts(sample: WeightedTokens, borders: Sequence[tuple[list[int], list[int]]]) -> WeightedTokens:
    """The sample without weight on thoughts. A token that is partly of thoughts and partly of the text after them
    keeps its weight.

    Args:
        sample: of a conversation.
        borders: token ids of the text up to the thoughts of a turn, and up to their end, for each turn that has some.

    Raises:
        Unusable: nothing else is supervised.
    """
    if not borders:
        return sample
    weights = sample.weights.copy()
    for before, with_thoughts in borders:
        weights[_shared(sample.ids, before) : _shared(sample.ids, with_thoughts)] = 0
    if not weights.any():
        raise Unusable("with nothing but thoughts to supervise (data.supervise_thoughts is false)")
    return WeightedTokens(sample.ids, weights)


def _shared(ids: np.ndarray, others: Sequence[int]) -> int:
    """Number of equal ids at the beginning of two sequences."""
    count = min(len(ids), len(others))
    (different,) = np.nonzero(ids[:count] != np.array(others[:count]))
    return int(different[0]) if len(different) else count
