"""A bridge to lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness): its tasks on llmsuite's models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from lm_eval.api.model import TemplateLM

from llmsuite.base.errors import UserError
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.generate import Generator
from llmsuite.inference.sampling import Sampling

_GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class HarnessModel(TemplateLM):
    """The `LM` of the harness."""

    def __init__(self, model: Any, generator: Generator, batch_size: int, max_new_tokens: int = 256):
        """
        Args:
            model: the live model of the generator.
            generator: for tasks that generate text.
            batch_size: texts per pass.
            max_new_tokens: length of an answer where the task does not set it.
        """
        super().__init__()
        self._model = model
        self._generator = generator
        self._batch_size = batch_size
        self._max_new_tokens = max_new_tokens
        self._longest = generator.decoder.max_length

    @property
    def eot_token_id(self) -> int:
        return self._generator.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token in front of a text without a context: as in the harness's own models the BOS token, or the EOS token
        where the tokenizer has no BOS token."""
        tokenizer = self._generator.tokenizer
        begin = tokenizer.special_tokens.get("bos_token")
        return tokenizer.token_id(begin) if begin else tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, with the special tokens in front of it unless `add_special_tokens` is false."""
        tokenizer = self._generator.tokenizer
        ids = tokenizer.encode(string)
        return ids if add_special_tokens is False else tokenizer.with_special_tokens(ids)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and True where it is the greedy one."""
        results: dict[int, tuple[float, bool]] = {}
        texts = [self._cut([*context, *continuation]) for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), self._batch_size):
            numbers = order[start : start + self._batch_size]
            ids = np.zeros([len(numbers), len(texts[numbers[0]])], "int64")
            for row, number in zip(ids, numbers):
                row[: len(texts[number])] = texts[number]
            with paddle.no_grad():
                hidden, _ = self._model.hidden_states(tensor_of(ids[:, :-1]))
                for row, number in enumerate(numbers):
                    last = len(texts[number]) - 1
                    size = len(requests[number][2])
                    logits = self._model.logits(hidden[row, last - size : last]).astype("float32")
                    targets = tensor_of(ids[row, last + 1 - size : last + 1])
                    nll = paddle.nn.functional.cross_entropy(logits, targets, reduction="sum")
                    results[number] = (-float(nll), bool((logits.argmax(-1) == targets).all()))
        return [results[number] for number in range(len(requests))]

    def _cut(self, text: list[int]) -> list[int]:
        """The end of a text that fits the model; the last token is only predicted."""
        return text[-(self._longest + 1) :]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of full texts, in windows of the model's length."""
        sums = []
        for request in requests:
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = []
            for start in range(0, len(ids), self._longest):
                before = [ids[start - 1]] if start else [self.prefix_token_id]
                windows.append((("", ""), before, ids[start : start + self._longest]))
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(windows)))
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate an answer to each request, up to the stop texts of the task."""
        answers = []
        for request in requests:
            context, options = request.args
            if unknown := sorted(set(options) - _GENERATION_OPTIONS):
                raise UserError(f"the task asks for {', '.join(unknown)} in generation, which is not supported here")
            until = options.get("until") or []
            stops = [until] if isinstance(until, str) else until
            temperature = 0.0
            if options.get("do_sample"):
                temperature = float(options.get("temperature") or 0.0)
            sampling = Sampling(
                temperature=temperature,
                top_k=int(options.get("top_k") or 0),
                top_p=float(options.get("top_p") or 1.0),
                max_new_tokens=int(options.get("max_gen_toks") or self._max_new_tokens),
                stop=tuple(stop for stop in stops if stop),
            )
            prompt = self.tok_encode(context)[-(self._longest - sampling.max_new_tokens) :]
            ((answer,),) = self._generator.answers([prompt], sampling)
            answers.append(answer.text)
        return answers


def evaluate_tasks(
    model: HarnessModel, tasks: Sequence[str], include: Path | None, limit: int | None, num_fewshot: int | None
) -> dict[str, dict[str, Any]]:
    """Run tasks; returns the metrics of each task.

    Args:
        model: the model to evaluate.
        tasks: names of tasks of the harness or of `include`.
        include: directory with additional tasks; None for none.
        limit: rows of each task; None for all.
        num_fewshot: examples in the prompt; None for the default of the task.

    Raises:
        UserError: there is no such task.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(include) if include else None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise UserError(f"--tasks: lm-evaluation-harness knows no {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    found = simple_evaluate(
        model, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=num_fewshot, log_samples=False
    )
    assert found is not None
    return {name: dict(values) for name, values in found["results"].items()}
