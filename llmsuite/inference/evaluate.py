"""Evaluation of a model: perplexity of texts, exact match of answers, and accuracy on preference pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.encoding import encode_answers
from llmsuite.data.rows import Preference, conversations_of
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError
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
                hidden, _ = model.hidden_states(paddle.to_tensor(ids[:, :-1]))
                for row, number in enumerate(numbers):  # one at a time: the logits of all would be the largest tensor
                    size = len(texts[number]) - 1
                    found[number] = np.zeros(0)
                    if size > 0:
                        nll = model.token_nll(hidden[row, :size], paddle.to_tensor(ids[row, 1 : size + 1]))
                        found[number] = -nll.numpy().astype("float64")
        return [found[number] for number in range(len(texts))]

    return score


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of a set of texts."""

    perplexity: float
    """exp of the mean negative log-probability of a token."""
    bits_per_byte: float
    """The same per byte of text, which does not depend on the tokenizer."""
    num_tokens: int
    """Tokens that were predicted: all but the first of each text."""


def perplexity(score: Scorer, tokenizer: TextTokenizer, texts: Sequence[str], max_length: int) -> Perplexity:
    """Perplexity of texts: every token but the first is predicted once, from at most max_length - 1 tokens before it.

    A text has what the tokenizer puts in front of it and behind it: it is whole, and where a model's texts end with a
    token, that it comes there is a part of what the model has learnt to predict.

    Raises:
        UserError: there is nothing to predict.
    """
    windows, num_bytes = [], 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts)):
        pieces = list(_windows(tokenizer.framed(ids, is_whole=True), max_length))
        windows += pieces
        num_bytes += len(text.encode()) if pieces else 0
    if not windows:
        raise UserError("no text has two tokens, so there is nothing to predict")
    values = np.concatenate(score(windows))
    total = float(-values.sum())
    return Perplexity(math.exp(total / len(values)), total / math.log(2) / num_bytes, len(values))


def _windows(ids: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    """Split a text; the last token of a window is the first of the next, so that each is predicted once."""
    for start in range(0, len(ids) - 1, length - 1):
        yield ids[start : start + length]


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """Share of answers that are exactly the expected ones."""

    share: float
    num_rows: int
    wrong: list[tuple[str, str]]
    """Answer and expected answer of the first rows that do not match."""


def exact_match(
    generator: Generator, prompts: Sequence[Prompt], wanted: Sequence[str], max_new_tokens: int, batch_size: int
) -> ExactMatch:
    """Compare greedy answers with the expected ones, but for white space around them."""
    sampling, wrong = Sampling(max_new_tokens=max_new_tokens), []
    answers = generator.answers((prompt.ids for prompt in prompts), sampling, batch_size=batch_size)
    for (answer,), right in zip(answers, wanted, strict=True):
        if answer.text.strip() != right.strip():
            wrong.append((answer.text.strip(), right.strip()))
    return ExactMatch(1 - len(wrong) / len(prompts), len(prompts), wrong[:5])


@dataclasses.dataclass(frozen=True)
class PreferenceAccuracy:
    """Accuracy of a model as a judge of preference pairs."""

    share: float
    """Share of pairs whose chosen answer is more likely than the rejected one; a tie counts half."""
    share_per_token: float
    """The same by the mean log-probability per token, which does not favour short answers."""
    num_pairs: int


def preference_accuracy(
    score: Scorer, tokenizer: TextTokenizer, template: ChatTemplate, rows: Sequence[Preference], max_length: int
) -> PreferenceAccuracy:
    """How often a model prefers the chosen answer, by the log-probabilities of both; equal answers are half a win.

    Raises:
        UserError: a pair is longer than the model's maximum length.
    """
    texts: list[tuple[int, ...]] = []
    starts: list[int] = []
    for number, row in enumerate(rows, 1):
        split = [template.split(conversation) for conversation in conversations_of(row)]
        for prompt, ids in encode_answers(split, tokenizer):
            if len(prompt) + len(ids) > max_length or not prompt or not ids:
                raise UserError(
                    f"row {number}: has {len(prompt)} + {len(ids)} tokens; the model takes 2 to {max_length}"
                )
            texts.append((*prompt, *ids))
            starts.append(len(prompt) - 1)
    # Each distinct text is scored once: in another row of a batch the same text may round otherwise, and would win.
    distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    values = score(list(distinct))
    answers = [values[distinct[text]][start:] for text, start in zip(texts, starts)]
    sums, means = ([float(f(values)) for values in answers] for f in (np.sum, np.mean))
    return PreferenceAccuracy(_wins(sums), _wins(means), len(rows))


def _wins(values: Sequence[float]) -> float:
    pairs = list(zip(values[::2], values[1::2]))
    return sum(1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0 for chosen, rejected in pairs) / len(
        pairs
    )
