"""Answers to the prompts of the evaluation, generated with the weights of the moment, compared with those of the rows.

A model for generation is beside the one that is trained, whole on each rank that reads data, and gets its weights at
each evaluation. The ranks share the prompts among them. An answer is a function of the weights, the seed and the
prompt, so the mesh changes it by rounding only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.generate import Generator
from llmsuite.inference.sampling import Sampling
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.resolve import RunPlan
from llmsuite.rl.local import LocalModel
from llmsuite.train.build import BuiltModel
from llmsuite.train.data import TrainingData
from llmsuite.train.stage import Question, Stage
from llmsuite.train.text_scores import scores
from llmsuite.train.whole_weights import whole_weights

NAMES = ("bleu4", "rouge1", "rouge2", "rougel", "exact_match")
"""The metrics that there are then."""


class AnswerEvaluation:
    """Generates and compares. Every rank of the run has one."""

    def __init__(self, plan: RunPlan, backend: DeviceBackend, mesh: Mesh, built: BuiltModel, data: TrainingData):
        """`plan` sets `generation.max_new_tokens`."""
        recipe = plan.recipe
        self._plan, self._mesh, self._section = plan, mesh, recipe.generation
        dtype = backend.parameter_dtype(recipe.engine.precision)
        self._weights = functools.partial(whole_weights, plan, built, dtype, mesh)
        self._questions: list[Question] = []
        self._generator: Generator | None = None
        assert self._section.max_new_tokens is not None
        self._sampling = Sampling(
            temperature=self._section.temperature,
            top_k=self._section.top_k,
            top_p=self._section.top_p,
            repetition_penalty=self._section.repetition_penalty,
            seed=recipe.seed,
            max_new_tokens=self._section.max_new_tokens,
        )
        count, self._length = self._section.max_samples, recipe.data.max_length
        self._batch_size = self._section.batch_size
        self._num_kept = None if self._section.save else self._section.log_samples
        if data.stage is None:
            return
        self._questions = _spread(functools.partial(_questions, data.stage, data.eval_as_read), count)
        self._model = LocalModel(plan, backend)
        tokenizer = data.stage.context.tokenizer
        stops = tokenizer.ends(plan.weights or tokenizer.directory)
        self._generator = Generator(self._model.decoder, tokenizer, stops)

    def evaluate(self) -> tuple[dict[str, float], list[dict[str, str]]]:
        """Answer with the weights of this moment; every rank of the run has to call it.

        Returns:
            The metrics `NAMES`, on every rank; and, on those that read data, the answers to keep: "prompt", "output"
            and "tgt", the reference.

        Raises:
            UserError: logits are not finite.
        """
        found, kept = [0.0] * len(NAMES), list[dict[str, str]]()
        if self._generator is None:
            for _ in self._weights():
                pass
        else:
            self._model.refresh(self._weights())
            decode = self._generator.tokenizer.decode
            texts = [decode(ids) for ids in self._answers()]
            self._model.release()
            references = [decode(list(question.answer)) for question in self._questions]
            if texts:
                found = [scores(texts, references)[name] for name in NAMES]
            kept = [
                {"prompt": decode(list(question.prompt)), "output": text, "tgt": reference}
                for question, text, reference in zip(self._questions[: self._num_kept], texts, references)
            ]
        return dict(zip(NAMES, collective.from_first_rank(found))), kept

    def _answers(self) -> list[list[int]]:
        """The tokens of each question's answer, the same on every rank that reads data."""
        assert self._generator is not None
        readers, count = self._mesh.readers, len(self._questions)
        # long and short prompts for every rank
        by_length = sorted(range(count), key=lambda i: (-len(self._questions[i].prompt), i))
        mine = sorted(by_length[readers.index(collective.rank()) :: len(readers)])
        prompts = [self._questions[i].prompt for i in mine]
        answers = self._generator.answers(prompts, self._sampling, batch_size=self._batch_size, max_length=self._length)
        whole = np.zeros([count, self._sampling.max_new_tokens])
        for i, (answer, *_) in zip(mine, answers):
            whole[i, : len(answer.ids)] = np.array(answer.ids) + 1
        whole = collective.sum_array_over_readers(whole)
        return [[int(token) - 1 for token in row if token] for row in whole]


def _questions(stage: Stage[Any], samples: Iterable[Any]) -> Iterator[Question]:
    for sample in samples:
        yield from stage.questions(sample)


def _spread(questions: Callable[[], Iterator[Question]], count: int | None) -> list[Question]:
    """So many questions, taken evenly from all; None for all. They are made twice, so that those that are left out are
    never in memory together."""
    total = sum(1 for _ in questions())
    kept = total if count is None else min(count, total)
    picked = {i * total // kept for i in range(kept)}
    return [question for i, question in enumerate(questions()) if i in picked]
