"""Evaluation of a model: perplexity of texts, exact match of answers, and accuracy on preference pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.encoding import encode_answers
from llmsuite.data.rows import Preference, conversations_of
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.generate import Generator
from llmsuite.inference.prompts import Prompt
from llmsuite.inference.sampling import Sampling

Scorer = Callable[[Sequence[Sequence[int]]], list[np.ndarray]]
"""Maps token ids of texts to the log-probability of each token but the first, given those before it."""


def scorer(model: Any, batch_size: int) -> Scorer:
    """A scorer of a live model; texts of similar length share a batch."""

    def score(texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        by_length = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(texts), batch_size):
            numbers = by_length[start : start + batch_size]
            ids = np.zeros([len(numbers), max(2, len(texts[numbers[0]]))], "int64")
            for row, number in zip(ids, numbers):
                row[: len(texts[number])] = texts[number]
            with paddle.no_grad():
                hidden, _ = model.hidden_states(tensor_of(ids[:, :-1]))
                for row, number in enumerate(numbers):  # one at a time: the logits of all would be the largest tensor
                    size = len(texts[number]) - 1
                    found[number] = np.zeros(0)
                    if size > 0:
                        nll = model.token_nll(hidden[row, :size], tensor_of(ids[row, 1 : size + 1]))
                        found[number] = -nll.numpy().astype("float64")  # they are summed over very many tokens
        return [found[number] for number in range(len(texts))]

    return score


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of a set of texts."""

    perplexity: float
    """exp of the mean negative log-probability of a token."""
    bits_per_byte: float
    """Negative log-probability in bits per byte of text, which does not depend on the tokenizer."""
    num_tokens: int
    """Predicted tokens: all but the first of each text."""


def perplexity(score: Scorer, tokenizer: TextTokenizer, texts: Sequence[str], max_length: int) -> Perplexity:
    """Perplexity of texts: every token but the first is predicted once, from at most max_length - 1 tokens before it.

    The tokenizer's special tokens at the beginning and the end of a text are included: the texts are complete, and a
    model that was trained on texts with an end token has to predict it.

    Raises:
        UserError: there is nothing to predict.
    """
    windows = []
    num_bytes = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts)):
        parts = list(_windows(tokenizer.with_special_tokens(ids, is_complete=True), max_length))
        windows += parts
        num_bytes += len(text.encode()) if parts else 0
    if not windows:
        raise UserError("no text has two tokens, so there is nothing to predict")
    values = np.concatenate(score(windows))
    total = float(-values.sum())  # in float64, as scores are
    return Perplexity(math.exp(total / len(values)), total / math.log(2) / num_bytes, len(values))


def _windows(ids: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    """Split a text; the last token of a window is the first of the next, so that each is predicted once."""
    for start in range(0, len(ids) - 1, length - 1):
        yield ids[start : start + length]


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """Fraction of answers that are exactly the expected ones."""

    share: float
    num_rows: int
    wrong: list[tuple[str, str]]
    """Answer and expected answer of the first rows that do not match."""


def exact_match(
    generator: Generator, prompts: Sequence[Prompt], expected: Sequence[str], max_new_tokens: int, batch_size: int
) -> ExactMatch:
    """Compare greedy answers with the expected ones, ignoring white space around them."""
    sampling = Sampling(max_new_tokens=max_new_tokens)
    wrong = []
    answers = generator.answers((prompt.ids for prompt in prompts), sampling, batch_size=batch_size)
    for (answer,), right in zip(answers, expected, strict=True):
        if answer.text.strip() != right.strip():
            wrong.append((answer.text.strip(), right.strip()))
    return ExactMatch(1 - len(wrong) / len(prompts), len(prompts), wrong[:5])


@dataclasses.dataclass(frozen=True)
class PreferenceAccuracy:
    """Accuracy of a model on preference pairs."""

    share: float
    """Fraction of pairs whose chosen answer has a higher log-probability than the rejected one; a tie counts half."""
    share_per_token: float
    """`share` by the mean log-probability per token, which does not favour short answers."""
    num_pairs: int


def preference_accuracy(
    score: Scorer, tokenizer: TextTokenizer, template: ChatTemplate, rows: Sequence[Preference], max_length: int
) -> PreferenceAccuracy:
    """Accuracy of a model on preference pairs, by the log-probabilities of both answers; a tie counts half.

    Raises:
        UserError: a pair is longer than the model's maximum length.
    """
    texts: list[tuple[int, ...]] = []
    starts: list[int] = []
    for number, row in enumerate(rows, 1):
        split = template.splits(conversations_of(row))
        for prompt, ids in encode_answers(split, tokenizer):
            if len(prompt) + len(ids) > max_length or not prompt or not ids:
                raise UserError(
                    f"row {number}: has {len(prompt)} + {len(ids)} tokens; the model takes 2 to {max_length}"
                )
            texts.append((*prompt, *ids))
            starts.append(len(prompt) - 1)
    # Each distinct text is scored once: in another row of a batch the same text may round differently, and a tie would
    # become a win.
    distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    values = score(list(distinct))
    answers = [values[distinct[text]][start:] for text, start in zip(texts, starts)]
    sums = [float(np.sum(values)) for values in answers]
    means = [float(np.mean(values)) for values in answers]
    return PreferenceAccuracy(_wins(sums), _wins(means), len(rows))


def _wins(values: Sequence[float]) -> float:
    pairs = list(zip(values[::2], values[1::2]))
    total = 0.0
    for chosen, rejected in pairs:
        if chosen > rejected:
            total += 1.0
        elif chosen == rejected:
            total += 0.5
    return total / len(pairs)
