"""Answers to the prompts of the evaluation, generated with the weights of the moment, compared with those of the rows.

A model for generation is beside the one that is trained, whole on each rank that reads data, and gets its weights at
each evaluation. The ranks share the prompts among them. An answer is a function of the weights, the seed and the
prompt, so the mesh changes it by rounding only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import numpy as np

from llmsuite.devices.base import DeviceBackend
from llmsuite.files import write_text_atomic
from llmsuite.inference.generate import Generator
from llmsuite.inference.prompts import stop_tokens
from llmsuite.inference.sampling import Sampling
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.resolve import RunPlan
from llmsuite.rl.local import LocalModel
from llmsuite.train.build import BuiltModel
from llmsuite.train.data import TrainingData
from llmsuite.train.stage import Question
from llmsuite.train.text_scores import scores
from llmsuite.train.whole_weights import whole_weights

NAMES = ("bleu4", "rouge1", "rouge2", "rougel", "exact_match")
"""The metrics that there are then."""
_DIRECTORY = "generations"


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
        self._saves = self._section.save
        self._batch_size = self._section.batch_size
        if data.stage is None:
            return
        found = [question for sample in data.eval for question in data.stage.questions(sample)]
        kept = len(found) if count is None else min(count, len(found))
        self._questions = [found[i * len(found) // kept] for i in range(kept)]  # of every length
        self._model = LocalModel(plan, backend)
        tokenizer = data.stage.context.tokenizer
        stops = stop_tokens(plan.weights or tokenizer.directory, tokenizer) | {tokenizer.eos_id}
        self._generator = Generator(self._model.decoder, tokenizer, stops)

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics `NAMES`, on every rank; all have to call it.

        Args:
            step: optimizer steps that are done.

        Raises:
            UserError: logits are not finite.
        """
        found = [0.0] * len(NAMES)
        if self._generator is None:
            for _ in self._weights():
                pass
        else:
            self._model.refresh(self._weights())
            decode = self._generator.tokenizer.decode
            texts = [decode(ids) for ids in self._answers()]
            references = [decode(list(question.answer)) for question in self._questions]
            if texts:
                found = [scores(texts, references)[name] for name in NAMES]
            if self._saves and collective.rank() == 0:
                self._save(step, texts, references)
        return dict(zip(NAMES, collective.from_first_rank(found)))

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

    def _save(self, step: int, texts: Sequence[str], references: Sequence[str]) -> None:
        assert self._generator is not None
        directory = self._plan.output_dir / _DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        rows = [
            {"prompt": self._generator.tokenizer.decode(list(question.prompt)), "output": text, "tgt": reference}
            for question, text, reference in zip(self._questions, texts, references)
        ]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_text_atomic(directory / f"step-{step}.jsonl", "".join(lines))
