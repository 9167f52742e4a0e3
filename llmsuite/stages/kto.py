"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): answers that are wanted, and others.

rows -> token ids of prompt and answer -> log-ratios of the answers to the reference model -> loss against z, the mean
log-ratio of unrelated answers: an estimate of the divergence of the model from the reference

z is a mean over the whole global batch, found in a pre-pass without gradients, so that neither micro-batches nor ranks
change it. The unrelated answer to a prompt is that of another row, always the same.

Shapes: A answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.data.rows import Unpaired, conversations_of
from llmsuite.data.sequences import Lazy, Measure, lengths_of
from llmsuite.errors import UserError
from llmsuite.stages.answers import (
    Answer,
    answer_logps,
    collate,
    ensure_eos,
    log_ratios,
    program_inputs,
    program_logps,
)
from llmsuite.stages.preference_losses import apo_zero, kto
from llmsuite.stages.reference import Reference
from llmsuite.stages.sections import KtoSection
from llmsuite.train.stage import Batch, DropCounts, LossTerms, PrePassKind, Stage, StageContext, Sums
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class LabelledAnswer:
    """An answer that is wanted or not."""

    answer: Answer
    desirable: bool
    unrelated: Answer | None
    """The answer of another row to this prompt; None when none fits."""


class KtoStage(Stage[LabelledAnswer]):
    """Makes wanted answers likelier and others less likely."""

    row_kind = "unpaired"
    row_by_row = True  # but for the unrelated answers, see `read`

    def __init__(self, section: KtoSection, context: StageContext):
        super().__init__(section, context)
        self._kind, self._beta = section.loss, section.beta
        self._desirable_weight, self._undesirable_weight = section.desirable_weight, section.undesirable_weight
        self._takes_reference = section.reference
        self._profile = section.profile()
        self._max_length = context.recipe.data.max_length
        self._template = context.template()
        self._reference = Reference(context, context.recipe.train.micro_batch_size)

    # data

    def make_samples(self, rows: Sequence[Unpaired], counts: DropCounts) -> list[LabelledAnswer]:
        """Answers that fit. Nothing is ever cut: the model would not learn to end a cut answer."""
        texts: list[tuple[str, str]] = []
        kept: list[tuple[int, Unpaired]] = []
        template = self._template.ahead_of_splits(found for row in rows for found in conversations_of(row))
        for number, row in enumerate(rows):
            if row.completion.is_empty:
                counts.drop("with an empty answer", number)
                continue
            try:
                texts += [template.split(conversation) for conversation in conversations_of(row)]
                kept.append((number, row))
            except UserError as error:
                counts.bad(number, str(error))
        encoded, eos = self.context.encode_answers(texts), self.context.tokenizer.eos_id
        labelled = []
        for (number, row), (prompt, ids) in zip(kept, encoded):
            answer = Answer(prompt, ensure_eos(ids, eos))
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

    def read(self, path: Path) -> Sequence[LabelledAnswer]:
        """The answers of a file."""
        samples = super().read(path)
        if self._kind != "kto" or not isinstance(samples, Lazy):
            return samples
        facts = lengths_of(samples, self.remembered)
        assert facts is not None
        return WithUnrelated(samples, facts, self._max_length)

    def remembered(self, samples: Sequence[LabelledAnswer]) -> np.ndarray:
        """`facts_of` the answers, or their lengths where no unrelated ones are needed."""
        return facts_of([sample.answer for sample in samples]) if self._kind == "kto" else self.row_lengths(samples)

    def row_lengths(self, samples: Sequence[LabelledAnswer]) -> np.ndarray:
        """[answers, 1]; [answers, 2] with the unrelated answers that z is the mean of."""
        both = self._kind == "kto"
        rows = [[s.answer, s.unrelated or s.answer] if both else [s.answer] for s in samples]
        return np.array([[len(answer) - 1 for answer in row] for row in rows], dtype="int64")

    def collate(self, samples: Sequence[LabelledAnswer]) -> Batch:
        """The answers, and under "unrelated" those that z is the mean of."""
        answers = [sample.answer for sample in samples]
        # where no unrelated answer fits, any other that counts 0: other ranks may wait for this pass
        others = [sample.unrelated or sample.answer for sample in samples] if self._kind == "kto" else []
        batch = self._collate(answers)
        batch["weight"] = float(len(samples))
        batch["desirable"] = np.array([sample.desirable for sample in samples], dtype="float32")
        if others:
            counts = np.array([sample.unrelated is not None for sample in samples], dtype="float32")
            batch["unrelated"] = {**self._collate(others), "counts": counts}
        if self._takes_reference == "adapter_off":
            batch["all"] = self._collate([*answers, *others])
        return batch

    def _collate(self, answers: Sequence[Answer]) -> Batch:
        batch = collate(answers, self.context.tokenizer.pad_id, self.context.length_multiple)
        if self._takes_reference == "cache" and self._reference.known:
            batch["reference"] = self._reference.of(answers)
        return batch

    # before training, and before each step

    def before_training(self, model: Any, samples: Iterable[LabelledAnswer]) -> None:
        """Compute the log-probabilities under the reference model, which is the initial one."""
        if self._takes_reference == "cache":
            self._reference.compute(model, _answers(samples))

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """The reference of these answers, or what z is the mean of."""
        if kind == "adapters_off":
            logps, num_answers = answer_logps(model, batch["all"]).numpy(), len(batch["input_ids"])
            batch["reference"] = logps[:num_answers]
            if self._kind == "kto":
                batch["unrelated"]["reference"] = logps[num_answers:]
            return {}
        unrelated = batch["unrelated"]
        ratios = log_ratios(answer_logps(model, unrelated), unrelated)
        return {"kl": ((ratios * paddle.to_tensor(unrelated["counts"])).sum(), float(unrelated["counts"].sum()))}

    # loss

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the answers; every answer weighs 1, whatever the weight of its kind, as in the paper."""
        ratios = log_ratios(answer_logps(model, batch), batch)
        desirable = paddle.to_tensor(batch["desirable"])
        rewards, num_answers, counts = (self._beta * ratios).detach(), batch["weight"], self.program_weights(batch)
        sums: dict[str, tuple[Any, float]] = {
            "rewards/desirable": ((rewards * desirable).sum(), counts["rewards/desirable"]),
            "rewards/undesirable": ((rewards * (1 - desirable)).sum(), counts["rewards/undesirable"]),
        }
        kl = 0.0
        if self._kind == "kto":
            kl = max(0.0, batch["prepass_stats"]["kl"])
            sums["kl"] = kl * num_answers, num_answers
        losses = self._losses(ratios, desirable, kl)
        return LossTerms(losses.sum(), num_answers, self._profile.checked(sums))

    def _losses(self, ratios: Tensor, desirable: Tensor, kl: Tensor | float) -> Tensor:
        """[A], times the weight of its kind."""
        wanted, unwanted = self._desirable_weight, self._undesirable_weight
        weights = desirable * wanted + (1 - desirable) * unwanted
        if self._kind == "kto":
            return kto(ratios, desirable, self._beta, kl) * weights
        return apo_zero(ratios, desirable, self._beta) * weights

    def program_inputs(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """See `answers.program_inputs`; [A]: log-probabilities under the reference, 1 for answers that are wanted, the
        divergence, and weights."""
        desirable = batch["desirable"]
        found = program_inputs(batch, length) | {"reference": batch["reference"], "desirable": desirable}
        if self._kind == "kto":
            found["kl"] = np.full(len(desirable), max(0.0, batch["prepass_stats"]["kl"]), "float32")
        return {**found, "weights": np.ones(len(desirable), "float32")}

    def program_weights(self, batch: Batch) -> dict[str, float]:
        """How many answers of each kind there are."""
        num_desirable = float(batch["desirable"].sum())
        return {"rewards/desirable": num_desirable, "rewards/undesirable": batch["weight"] - num_desirable}

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum over the answers."""
        ratios = (program_logps(model, inputs) - inputs["reference"]).astype("float32")
        desirable, weights = inputs["desirable"], inputs["weights"]
        rewards = (self._beta * ratios).detach()
        sums = {
            "rewards/desirable": (rewards * desirable * weights).sum(),
            "rewards/undesirable": (rewards * (1 - desirable) * weights).sum(),
        }
        if self._kind == "kto":
            sums["kl"] = (inputs["kl"] * weights).sum()
        losses = self._losses(ratios, desirable, inputs.get("kl", 0.0))
        return {"loss": (losses * weights).sum(), **self._profile.checked(sums)}


def unrelated_answers(answers: Sequence[Answer], max_length: int) -> list[Answer | None]:
    """For the prompt of each answer, the next answer in cyclic order to another prompt that fits; None when there is
    none among the next thousand."""
    numbers = unrelated_numbers(facts_of(answers), max_length).tolist()
    pairs = zip(answers, numbers)
    return [None if number < 0 else Answer(answer.prompt, answers[number].ids) for answer, number in pairs]


def facts_of(answers: Sequence[Answer]) -> np.ndarray:
    """[answers, 3], int64: tokens of the prompt and of the answer, and a number that prompts have in common only if
    they are the same."""
    found = [(len(answer.prompt), len(answer.ids), _number_of(answer.prompt)) for answer in answers]
    return np.array(found, "int64").reshape(len(answers), 3)


def _number_of(prompt: Sequence[int]) -> int:
    digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def unrelated_numbers(facts: np.ndarray, max_length: int) -> np.ndarray:
    """[answers]: the number of what `unrelated_answers` finds, from `facts_of` all answers; -1 for None."""
    prompt_lengths, lengths, prompts = facts.T
    found, left = np.full(len(facts), -1), np.arange(len(facts))
    for step in range(1, min(len(facts), _MAX_STEPS + 1)):
        other = (left + step) % len(facts)
        fits = (prompts[other] != prompts[left]) & (prompt_lengths[left] + lengths[other] <= max_length)
        found[left[fits]] = other[fits]
        left = left[~fits]
        if not len(left):
            break
    return found


class WithUnrelated(Lazy[LabelledAnswer]):
    """Answers of a file that is larger than memory, each with its unrelated one."""

    def __init__(self, samples: Sequence[LabelledAnswer], facts: np.ndarray, max_length: int):
        """`facts`: `facts_of` the answers."""
        self._samples, self._facts = samples, facts
        self._others = unrelated_numbers(facts, max_length)

    def __len__(self) -> int:
        return len(self._samples)

    def make(self, number: int) -> LabelledAnswer:
        sample, other = self._samples[number], int(self._others[number])
        if other < 0:
            return sample
        return dataclasses.replace(sample, unrelated=Answer(sample.answer.prompt, self._samples[other].answer.ids))

    def lengths(self, measure: Measure) -> np.ndarray:
        prompts, answers = self._facts[:, 0], self._facts[:, 1]
        others = np.where(self._others < 0, answers, answers[self._others])
        return np.stack([prompts + answers - 1, prompts + others - 1], 1)


_MAX_STEPS = 1000


def _answers(samples: Iterable[LabelledAnswer]) -> Iterator[Answer]:
    """All answers whose reference log-probabilities are needed."""
    for sample in samples:
        yield sample.answer
        if sample.unrelated is not None:
            yield sample.unrelated
