"""Generation of answers to prompts: many in batches, one as a stream, or by beam search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.batch import Batch, DecodingSequence, TokenLogprob, check_context_length
from llmsuite.inference.beam import BeamParams, beam_search
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
            agree: as for `Batch`.
        """
        self.decoder = decoder
        self.tokenizer = tokenizer
        self._agree = agree
        self.stop_ids = {tokenizer.eos_id} if stop_ids is None else stop_ids

    def make_sequence(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        number: int = 0,
        guide: Guide | None = None,
        adapter: str | None = None,
        shown: Sequence[str] = (),
    ) -> DecodingSequence:
        """A new sequence of this model; `shown` as for `TextStream`, the others as for `DecodingSequence`. Raises
        UserError when it does not fit the context."""
        check_context_length(prompt, sampling.max_new_tokens, self.decoder)
        text = TextStream(self.tokenizer, sampling.stop, shown)
        return DecodingSequence(prompt, sampling, self.stop_ids, text, number, guide, adapter)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiler of the grammars for `make_sequence`."""
        return Grammars(self.tokenizer, self.decoder.vocab_size, self.stop_ids)

    def answers(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling,
        num_return_sequences: int = 1,
        batch_size: int = 8,
        max_length: int | None = None,
    ) -> Iterator[list[Answer]]:
        """Yield the answers to each prompt, in the order of the prompts, which join the batch as soon as there is room.

        Args:
            prompts: token ids.
            sampling: sampling parameters; an answer does not depend on the rest of the batch.
            num_return_sequences: answers to each prompt.
            batch_size: answers that are decoded together.
            max_length: of a prompt and its answer together, where that leaves less than `sampling.max_new_tokens`.

        Raises:
            UserError: a prompt or an answer does not fit the context.
        """

        def limited(prompt: Sequence[int]) -> Sampling:
            room = sampling.max_new_tokens if max_length is None else max_length - len(prompt)
            return dataclasses.replace(sampling, max_new_tokens=max(0, min(room, sampling.max_new_tokens)))

        batch = Batch(self.decoder, self._agree)
        remaining = iter(prompts)
        waiting: list[DecodingSequence] = []
        started: list[list[DecodingSequence]] = []  # by prompt: answers that have not been returned yet
        while True:
            while len(batch.sequences) + len(waiting) < batch_size:
                prompt = next(remaining, None)
                if prompt is None:
                    break
                params = limited(prompt)
                started.append([self.make_sequence(prompt, params, number) for number in range(num_return_sequences)])
                waiting += [sequence for sequence in started[-1] if not sequence.finish_reason]
            if not started:
                return
            new = waiting[: batch_size - len(batch.sequences)]
            del waiting[: len(new)]
            if new or batch.sequences:
                batch.advance(new)
            while started and all(sequence.finish_reason for sequence in started[0]):
                yield [_answer(sequence) for sequence in started.pop(0)]

    def stream(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[str]:
        """Yield the text of one answer as it becomes certain."""
        batch = Batch(self.decoder, self._agree)
        sequence = self.make_sequence(prompt, sampling)
        new = [sequence]
        while not sequence.finish_reason:
            for _, text in batch.advance(new):
                if text:
                    yield text
            new = []

    def beam_answers(self, prompt: Sequence[int], beams: BeamParams, num_return_sequences: int = 1) -> list[Answer]:
        """The best answers that beam search finds, in descending order of their scores."""
        check_context_length(prompt, beams.max_new_tokens, self.decoder)
        answers = []
        for one in beam_search(self.decoder, prompt, self.stop_ids, beams, num_return_sequences, self._agree):
            finish_reason = "stop" if one.stopped else "length"
            answers.append(Answer(self.tokenizer.decode(one.ids), one.ids, finish_reason, score=one.score))
        return answers


def generate(
    decoder: Decoder, prompt: Sequence[int], stop_ids: set[int], sampling: Sampling, number: int = 0
) -> Iterator[int]:
    """Yield the new token ids one by one, without the stop token.

    Args:
        decoder: the model.
        prompt: token ids, at least one.
        stop_ids: tokens that end the answer.
        sampling: sampling parameters; stop texts are ignored.
        number: as for `DecodingSequence`.
    """
    batch = Batch(decoder)
    sequence = DecodingSequence(prompt, sampling, stop_ids, number=number)
    new = [sequence]
    while not sequence.finish_reason:
        batch.advance(new)
        new = []
        if sequence.finish_reason != "stop":
            yield sequence.ids[-1]


def greedy_answers(
    generator: Generator, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int
) -> Iterator[list[Answer]]:
    """Yield the answer to each prompt, by the decoding loop of an exported program.

    Raises:
        UserError: the generator's model has no decoding loop, or a prompt does not fit the context.
    """
    predictor: Any = generator.decoder
    for start in range(0, len(prompts), batch_size):
        for ids in predictor.greedy(prompts[start : start + batch_size], max_new_tokens, generator.stop_ids):
            finish_reason = "stop" if len(ids) < max_new_tokens else "length"
            yield [Answer(generator.tokenizer.decode(ids), tuple(ids), finish_reason)]


def _answer(sequence: DecodingSequence) -> Answer:
    assert sequence.text is not None
    assert sequence.finish_reason is not None
    return Answer(sequence.text.text, tuple(sequence.ids), sequence.finish_reason, tuple(sequence.logprobs))
