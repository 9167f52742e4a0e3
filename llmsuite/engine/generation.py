"""Evaluation by generation: answers of the current model to the evaluation prompts, compared with the references.

Each data-loading rank holds a full model for generation next to the trained one, which gets its weights at each
evaluation. The prompts are split over these ranks. An answer depends only on the weights, the seed and the prompt, so
the mesh changes it by rounding only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.data import TrainingData
from llmsuite.engine.full_weights import full_weights
from llmsuite.engine.stage import EvalPrompt, GeneratingStage
from llmsuite.engine.text_scores import scores
from llmsuite.inference.generate import Generator
from llmsuite.inference.sampling import Sampling
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.plans import ModelPlan, TrainPlan
from llmsuite.rl.local import LocalModel

METRIC_NAMES = ("bleu4", "rouge1", "rouge2", "rougel", "exact_match")
"""Metrics of the evaluation by generation."""


class GenerationEvaluation:
    """Generates answers and compares them with the references. Every rank of the run has an instance."""

    def __init__(
        self,
        model_plan: ModelPlan,
        train_plan: TrainPlan,
        precision: str,
        max_length: int,
        backend: DeviceBackend,
        mesh: Mesh,
        built: BuiltModel,
        data: TrainingData,
    ):
        """
        Args:
            model_plan: plan of the model.
            train_plan: plan of the training, whose recipe sets `generation.max_new_tokens`.
            precision: precision of the run.
            max_length: longest prompt with its answer, in tokens.
            backend: backend of the device.
            mesh: coordinates of this rank.
            built: the trained model.
            data: data of the run.
        """
        self._mesh = mesh
        self._section = train_plan.generation
        dtype = backend.parameter_dtype(precision)
        self._weights = functools.partial(full_weights, model_plan, built, dtype, mesh)
        self._prompts: list[EvalPrompt] = []
        """Prompts of all evaluation sets."""
        self._sets = [evaluation.name for evaluation in data.evaluations]
        self._counts = [0] * len(self._sets)
        """Number of the prompts of each set."""
        self._names = [evaluation.metric(name) for evaluation in data.evaluations for name in METRIC_NAMES]
        self._generator: Generator | None = None
        assert self._section.max_new_tokens is not None
        self._sampling = Sampling(
            temperature=self._section.temperature,
            top_k=self._section.top_k,
            top_p=self._section.top_p,
            repetition_penalty=self._section.repetition_penalty,
            seed=train_plan.seed,
            max_new_tokens=self._section.max_new_tokens,
        )
        count = self._section.max_samples
        self._length = max_length
        self._batch_size = self._section.batch_size
        self._num_saved = None if self._section.save else self._section.log_samples
        if data.stage is None:
            return
        assert isinstance(data.stage, GeneratingStage), "`make_stage` checks the class"
        for at, evaluation in enumerate(data.evaluations):
            prompts = _evenly_spaced(functools.partial(_prompts_of, data.stage, evaluation.in_file_order), count)
            self._counts[at] = len(prompts)
            self._prompts += prompts
        self._model = LocalModel(model_plan, backend, precision)
        tokenizer = data.stage.context.tokenizer
        stops = tokenizer.stop_token_ids(model_plan.weights or tokenizer.directory)
        self._generator = Generator(self._model.decoder, tokenizer, stops)

    def evaluate(self) -> tuple[dict[str, float], list[dict[str, str]]]:
        """Generate answers with the current weights. A collective call: it gathers the weights of all ranks.

        Returns:
            The metrics `METRIC_NAMES` of each evaluation set, on every rank; and, on data-loading ranks, the answers to
            save: "prompt", "output" and "tgt", the reference; with several sets also "set", its name.

        Raises:
            UserError: logits are not finite.
        """
        values = [0.0] * len(self._names)
        saved = list[dict[str, str]]()
        if self._generator is None:
            for _ in self._weights():  # take part in the collective gathering
                pass
        else:
            self._model.refresh(self._weights())
            decode = self._generator.tokenizer.decode
            texts = [decode(ids) for ids in self._answers()]
            self._model.release()
            references = [decode(list(prompt.answer)) for prompt in self._prompts]
            values = []
            begin = 0
            for name, count in zip(self._sets, self._counts):
                mine = slice(begin, begin + count)
                begin += count
                found = scores(texts[mine], references[mine]) if count else dict.fromkeys(METRIC_NAMES, 0.0)
                values += [found[metric] for metric in METRIC_NAMES]
                of_set = {"set": name} if name else {}
                for prompt, text, reference in list(zip(self._prompts[mine], texts[mine], references[mine]))[
                    : self._num_saved
                ]:
                    answer = {"prompt": decode(list(prompt.prompt)), "output": text, "tgt": reference}
                    saved.append(of_set | answer)
        # rank 0 has compared the texts, and every rank decides by the metrics, such as whether to stop early
        return dict(zip(self._names, collective.broadcast_from_rank0(values))), saved

    def _answers(self) -> list[list[int]]:
        """Generate the answer of each prompt as token ids, the same on every data-loading rank."""
        assert self._generator is not None
        readers = self._mesh.loader_ranks
        count = len(self._prompts)
        # dealt in turn from the sorted prompts, so that every rank gets long and short ones
        by_length = sorted(range(count), key=lambda i: (-len(self._prompts[i].prompt), i))
        mine = sorted(by_length[readers.index(collective.rank()) :: len(readers)])
        prompts = [self._prompts[i].prompt for i in mine]
        answers = self._generator.answers(prompts, self._sampling, batch_size=self._batch_size, max_length=self._length)
        tokens = np.zeros([count, self._sampling.max_new_tokens])
        for i, (answer, *_) in zip(mine, answers):
            tokens[i, : len(answer.ids)] = np.array(answer.ids) + 1  # 0 is padding
        tokens = collective.sum_array_over_loader_ranks(tokens)  # each rank has the rows of its prompts, else zeros
        answers_ids = []
        for row in tokens:
            answers_ids.append([int(token) - 1 for token in row if token])
        return answers_ids


def _prompts_of(stage: GeneratingStage[Any], samples: Iterable[Any]) -> Iterator[EvalPrompt]:
    for sample in samples:
        yield from stage.eval_prompts(sample)


def _evenly_spaced(prompts: Callable[[], Iterator[EvalPrompt]], count: int | None) -> list[EvalPrompt]:
    """Pick `count` prompts, evenly spaced over all; None for all. Two passes over the prompts, so that those that are
    not picked are never in memory together."""
    total = sum(1 for _ in prompts())
    kept = total if count is None else min(count, total)
    picked = {i * total // kept for i in range(kept)}
    return [prompt for i, prompt in enumerate(prompts()) if i in picked]
