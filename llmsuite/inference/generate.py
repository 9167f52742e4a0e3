"""Generates answers to prompts: many in batches, one as a stream, or by beam search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.batch import Batch, Line, TokenLogprob, check_room
from llmsuite.inference.beam import Beams, beam_search
from llmsuite.inference.decoder import Decoder
from llmsuite.inference.guided import Grammars, Guide
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.text import TextStream


@dataclasses.dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    """Text without special tokens and without the stop text."""
    ids: tuple[int, ...]
    """Token ids without the stop token, but with the tokens of a stop text."""
    finish_reason: str
    """"stop": a stop token or stop text; "length": max_new_tokens."""
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float | None = None
    """Score of beam search; None otherwise."""

    def row(self) -> dict[str, Any]:
        """The answer as JSON data."""
        row: dict[str, Any] = {"text": self.text, "ids": list(self.ids), "finish_reason": self.finish_reason}
        if self.score is not None:
            row["score"] = self.score
        if self.logprobs:
            row["logprobs"] = [{"token": t.token, "logprob": t.logprob, "top": t.top} for t in self.logprobs]
        return row


class Generator:
    """A model with its tokenizer."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: TextTokenizer,
        stop_ids: set[int] | None = None,
        agree: Callable[[list[int]], list[int]] = lambda tokens: tokens,
    ):
        """
        Args:
            decoder: the model.
            tokenizer: of the model.
            stop_ids: tokens that end an answer; None for the tokenizer's end-of-sequence token.
            agree: see `Batch`.
        """
        self.decoder, self.tokenizer, self._agree = decoder, tokenizer, agree
        self.stop_ids = {tokenizer.eos_id} if stop_ids is None else stop_ids

    def line(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        number: int = 0,
        guide: Guide | None = None,
        adapter: str | None = None,
    ) -> Line:
        """A new answer; see `Line`. Raises UserError when there is no room for it in the model."""
        check_room(prompt, sampling.max_new_tokens, self.decoder)
        return Line(prompt, sampling, self.stop_ids, TextStream(self.tokenizer, sampling.stop), number, guide, adapter)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for `line`."""
        return Grammars(self.tokenizer, self.decoder.vocab_size, self.stop_ids)

    def answers(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling,
        num_return_sequences: int = 1,
        batch_size: int = 8,
        max_length: int | None = None,
    ) -> Iterator[list[Answer]]:
        """The answers to each prompt, in the order of the prompts, which join the batch as there is room.

        Args:
            prompts: token ids.
            sampling: how to choose; every answer is the same whatever else is in the batch.
            num_return_sequences: answers to each prompt.
            batch_size: answers that are decoded together.
            max_length: of a prompt and its answer together, where that leaves less than `sampling.max_new_tokens`.

        Raises:
            UserError: there is no room for an answer.
        """

        def limited(prompt: Sequence[int]) -> Sampling:
            room = sampling.max_new_tokens if max_length is None else max_length - len(prompt)
            return dataclasses.replace(sampling, max_new_tokens=max(0, min(room, sampling.max_new_tokens)))

        batch, coming = Batch(self.decoder, self._agree), iter(prompts)
        waiting: list[Line] = []
        begun: list[list[Line]] = []  # prompts whose answers have not been returned yet
        while True:
            while len(batch.lines) + len(waiting) < batch_size and (prompt := next(coming, None)) is not None:
                begun.append([self.line(prompt, limited(prompt), number) for number in range(num_return_sequences)])
                waiting += [line for line in begun[-1] if not line.finished]
            if not begun:
                return
            new = waiting[: batch_size - len(batch.lines)]
            del waiting[: len(new)]
            if new or batch.lines:
                batch.advance(new)
            while begun and all(line.finished for line in begun[0]):
                yield [_answer(line) for line in begun.pop(0)]

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[str]:
        """One answer, piece by piece."""
        batch, line = Batch(self.decoder, self._agree), self.line(prompt, sampling)
        new = [line]
        while not line.finished:
            for _, text in batch.advance(new):
                if text:
                    yield text
            new = []

    def beam_answers(self, prompt: Sequence[int], beams: Beams, num_return_sequences: int = 1) -> list[Answer]:
        """The best answers that beam search finds."""
        check_room(prompt, beams.max_new_tokens, self.decoder)
        found = beam_search(self.decoder, prompt, self.stop_ids, beams, num_return_sequences, self._agree)
        return [
            Answer(self.tokenizer.decode(f.ids), f.ids, "stop" if f.stopped else "length", score=f.score) for f in found
        ]


def generate(
    decoder: Decoder, prompt: Sequence[int], stop_ids: set[int], sampling: Sampling, number: int = 0
) -> Iterator[int]:
    """Yield new token ids one by one; the stop token is not among them.

    Args:
        decoder: the model.
        prompt: token ids, at least one.
        stop_ids: tokens that end the answer.
        sampling: how to choose; stop texts are not looked for.
        number: see `Line`.
    """
    batch, line = Batch(decoder), Line(prompt, sampling, stop_ids, number=number)
    new = [line]
    while not line.finished:
        batch.advance(new)
        new = []
        if line.finished != "stop":
            yield line.ids[-1]


def greedy_answers(
    generator: Generator, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int
) -> Iterator[list[Answer]]:
    """The answer to each prompt, by the decoding loop of an exported program.

    Raises:
        UserError: the model of the generator has none, or a prompt has no room.
    """
    predictor: Any = generator.decoder
    for start in range(0, len(prompts), batch_size):
        for ids in predictor.greedy(prompts[start : start + batch_size], max_new_tokens, generator.stop_ids):
            ended = "stop" if len(ids) < max_new_tokens else "length"
            yield [Answer(generator.tokenizer.decode(ids), tuple(ids), ended)]


def _answer(line: Line) -> Answer:
    assert line.text is not None
    assert line.finished is not None
    return Answer(line.text.text, tuple(line.ids), line.finished, tuple(line.logprobs))
