"""Kahneman-Tversky optimisation, KTO (Ethayarajh et al. 2024, arXiv 2402.01306): single desirable or undesirable
answers.

rows -> token ids of prompt and answer -> log-ratios of the answers to the reference model -> loss relative to z, the
mean log-ratio of unrelated answers, which estimates the KL divergence of the model from the reference

z is a mean over the full global batch, computed in a pre-pass without gradients, so it depends neither on micro-batches
nor on ranks. The unrelated answer to a prompt is the answer of another row, the same one in every epoch.

Shapes: A answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.data.lazy_sequences import LazySequence, LengthFunction, lengths_of
from llmsuite.data.rows import Unpaired, conversations_of
from llmsuite.devices.tensors import array_of
from llmsuite.engine.batch import BatchLayout, stat, tensor, total
from llmsuite.engine.row_reader import RowReader
from llmsuite.engine.stage import Batch, DropCounts, LossTerms, PrePassKind, Stage, StageContext, Sums
from llmsuite.stages.answers import (
    Answer,
    answer_logps,
    collate,
    ended,
    log_ratios,
)
from llmsuite.stages.preference_losses import apo_zero, kto
from llmsuite.stages.reference import Reference
from llmsuite.stages.sections import KtoSection


@dataclasses.dataclass(frozen=True)
class LabelledAnswer:
    """A desirable or undesirable answer."""

    answer: Answer
    desirable: bool
    unrelated: Answer | None
    """The prompt with the answer of another row; None where no answer fits."""


class KtoStage(Stage[LabelledAnswer]):
    """Raises the probability of desirable answers and lowers that of undesirable ones."""

    row_kind = "unpaired"
    row_by_row = True  # except for the unrelated answers, which the reader adds

    def __init__(self, section: KtoSection, context: StageContext):
        super().__init__(section, context)
        self._kind = section.loss
        self._beta = section.beta
        self._desirable_weight = section.desirable_weight
        self._undesirable_weight = section.undesirable_weight
        self._reference_from = section.reference
        self._profile = section.profile()
        self._max_length = context.data.max_length
        self._template = context.template()
        self._reference = Reference(context, context.train.micro_batch_size)
        if self._kind == "kto":
            self.reader = _UnrelatedReader(self)

    # data

    def make_samples(self, rows: Sequence[Unpaired], counts: DropCounts) -> list[LabelledAnswer]:
        """Answers that fit. Nothing is truncated: the model would not learn to end a truncated answer."""
        texts: list[tuple[str, str]] = []
        kept: list[tuple[int, Unpaired]] = []
        template = self._template.prerender_splits(found for row in rows for found in conversations_of(row))
        for number, row in enumerate(rows):
            if row.completion.is_empty:
                counts.drop("with an empty answer", number)
                continue
            try:
                texts += template.splits(conversations_of(row))
                kept.append((number, row))
            except UserError as error:
                counts.bad(number, str(error))
        encoded = self.context.encode_answers(texts)
        eos = self.context.tokenizer.eos_id
        labelled = []
        for (number, row), (prompt, ids) in zip(kept, encoded):
            answer = Answer(prompt, ended(ids, eos, self.context.data.end_of_answer))
            if not answer.prompt:
                counts.drop("with a prompt of no tokens (nothing would predict the answer)", number)
            elif answer.ids.count(eos) > 1:
                counts.drop("with the end-of-sequence token inside an answer", number)
            elif len(answer) > self._max_length:
                reason = f"longer than data.max_length {self._max_length} (the end of an answer would be cut off)"
                counts.drop(reason, number)
            else:
                labelled.append((answer, row.desirable))
        if self._kind == "apo_zero":
            return [LabelledAnswer(*pair, None) for pair in labelled]
        unrelated = unrelated_answers([answer for answer, _ in labelled], self._max_length)
        return [LabelledAnswer(*pair, other) for pair, other in zip(labelled, unrelated)]

    def row_lengths(self, samples: Sequence[LabelledAnswer]) -> np.ndarray:
        """Lengths of the answers, [answers, 1]; [answers, 2] with those of the unrelated answers."""
        lengths = [[len(sample.answer) - 1 for sample in samples]]
        if self._kind == "kto":
            lengths.append([len(sample.unrelated or sample.answer) - 1 for sample in samples])
        return np.stack([np.array(column, "int64") for column in lengths], axis=1)

    def collate(self, samples: Sequence[LabelledAnswer]) -> Batch:
        """A batch of the answers, with the unrelated answers as a batch under "unrelated"."""
        answers = [sample.answer for sample in samples]
        others: list[Answer] = []
        if self._kind == "kto":
            # where no unrelated answer fits, the answer itself with weight 0, as all ranks run this forward pass
            others = [sample.unrelated or sample.answer for sample in samples]
        batch = self._collate(answers)
        batch["weight"] = float(len(samples))
        batch["desirable"] = np.array([sample.desirable for sample in samples], dtype="float32")
        batch["undesirable"] = 1 - batch["desirable"]
        if others:
            counts = np.array([sample.unrelated is not None for sample in samples], dtype="float32")
            batch["unrelated"] = {**self._collate(others), "counts": counts}
        if self._reference_from == "adapter_off":
            batch["all"] = self._collate([*answers, *others])
        return batch

    def _collate(self, answers: Sequence[Answer]) -> Batch:
        batch = collate(answers, self.context.tokenizer.pad_id, self.context.length_multiple)
        if self._reference_from == "cache" and self._reference.table:
            batch["reference"] = self._reference.logps_of(answers)
        return batch

    # before training, and before each step

    def before_training(self, model: Any, samples: Iterable[LabelledAnswer]) -> None:
        """Compute the log-probabilities under the reference model, which is the initial model."""
        if self._reference_from == "cache":
            self._reference.compute(model, _answers(samples))

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Store the reference log-probabilities in the batch, or return the sum of the log-ratios whose mean is z."""
        if kind == "adapters_off":
            logps = array_of(answer_logps(model, batch["all"]))
            num_answers = len(batch["input_ids"])
            batch["reference"] = logps[:num_answers]
            if self._kind == "kto":
                batch["unrelated"]["reference"] = logps[num_answers:]
            return {}
        unrelated = batch["unrelated"]
        ratios = log_ratios(answer_logps(model, unrelated), unrelated)
        return {"kl": ((ratios * tensor(unrelated, "counts")).sum(), float(unrelated["counts"].sum()))}

    # loss

    @property
    def batch_layout(self) -> BatchLayout:
        return BatchLayout(answers=["reference", "desirable", "undesirable"])

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the answers. The denominator is their number, whatever the weight of their kind, as in the paper."""
        ratios = log_ratios(answer_logps(model, batch), batch)
        desirable = tensor(batch, "desirable")
        undesirable = tensor(batch, "undesirable")
        rewards = (self._beta * ratios).detach()
        sums = {
            "rewards/desirable": ((rewards * desirable).sum(), total(batch, "desirable")),
            "rewards/undesirable": ((rewards * undesirable).sum(), total(batch, "undesirable")),
        }
        num_answers = total(batch, "weight")
        kl: Tensor | float = 0.0
        if self._kind == "kto":
            kl = stat(batch, "kl").clip(min=0.0)
            sums["kl"] = (kl * paddle.ones_like(rewards)).sum(), num_answers
        losses = self._losses(ratios, desirable, kl)
        return LossTerms(losses.sum(), num_answers, self._profile.checked(sums))

    def _losses(self, ratios: Tensor, desirable: Tensor, kl: Tensor | float) -> Tensor:
        """The loss of each answer times the weight of its kind, [A]."""
        weights = desirable * self._desirable_weight + (1 - desirable) * self._undesirable_weight
        if self._kind == "kto":
            return kto(ratios, desirable, self._beta, kl) * weights
        return apo_zero(ratios, desirable, self._beta) * weights


def unrelated_answers(answers: Sequence[Answer], max_length: int) -> list[Answer | None]:
    """For the prompt of each answer, the next answer in cyclic order that belongs to another prompt and fits; None if
    there is none among the next thousand."""
    numbers = unrelated_indices(length_facts(answers), max_length).tolist()
    pairs = zip(answers, numbers)
    return [None if number < 0 else Answer(answer.prompt, answers[number].ids) for answer, number in pairs]


def length_facts(answers: Sequence[Answer]) -> np.ndarray:
    """Facts from which unrelated answers are found, [answers, 3] int64: lengths of prompt and answer, and a hash of the
    prompt."""
    found = [(len(answer.prompt), len(answer.ids), _prompt_hash(answer.prompt)) for answer in answers]
    return np.array(found, "int64").reshape(len(answers), 3)


def _prompt_hash(prompt: Sequence[int]) -> int:
    digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def unrelated_indices(facts: np.ndarray, max_length: int) -> np.ndarray:
    """The index of the unrelated answer of each answer, [answers]; -1 for None. `facts`: `length_facts` of all
    answers."""
    prompt_lengths, lengths, prompts = facts.T
    found = np.full(len(facts), -1)
    remaining = np.arange(len(facts))
    for step in range(1, min(len(facts), _MAX_STEPS + 1)):
        other = (remaining + step) % len(facts)
        fits = (prompts[other] != prompts[remaining]) & (prompt_lengths[remaining] + lengths[other] <= max_length)
        found[remaining[fits]] = other[fits]
        remaining = remaining[~fits]
        if not len(remaining):
            break
    return found


class _UnrelatedReader(RowReader[LabelledAnswer]):
    """Reads answers, and gives each its unrelated answer where rows are made into samples one by one."""

    def __init__(self, stage: KtoStage):
        super().__init__(stage)
        self._max_length = stage.context.data.max_length

    def arrange(self, samples: Sequence[LabelledAnswer], path: Path) -> Sequence[LabelledAnswer]:
        if not isinstance(samples, LazySequence):
            return samples
        facts = lengths_of(samples, self.cached_numbers)
        assert facts is not None
        return WithUnrelated(samples, facts, self._max_length)

    def cached_numbers(self, samples: Sequence[LabelledAnswer]) -> np.ndarray:
        """`length_facts` of the answers."""
        return length_facts([sample.answer for sample in samples])


class WithUnrelated(LazySequence[LabelledAnswer]):
    """Answers of a file that is larger than memory, each with its unrelated answer."""

    def __init__(self, samples: Sequence[LabelledAnswer], facts: np.ndarray, max_length: int):
        """`facts`: `length_facts` of the answers."""
        self._samples = samples
        self._facts = facts
        self._others = unrelated_indices(facts, max_length)

    def __len__(self) -> int:
        return len(self._samples)

    def make(self, number: int) -> LabelledAnswer:
        sample = self._samples[number]
        other = int(self._others[number])
        if other < 0:
            return sample
        return dataclasses.replace(sample, unrelated=Answer(sample.answer.prompt, self._samples[other].answer.ids))

    def lengths(self, measure: LengthFunction) -> np.ndarray:
        prompts = self._facts[:, 0]
        answers = self._facts[:, 1]
        others = np.where(self._others < 0, answers, answers[self._others])
        return np.stack([prompts + answers - 1, prompts + others - 1], 1)


_MAX_STEPS = 1000
"""Maximum distance of an unrelated answer, which bounds the time of the search."""


def _answers(samples: Iterable[LabelledAnswer]) -> Iterator[Answer]:
    """All answers that need reference log-probabilities."""
    for sample in samples:
        yield sample.answer
        if sample.unrelated is not None:
            yield sample.unrelated
