"""Continuous batching: sequences join and leave the batch at any pass, and each decodes as it would alone."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from llmsuite.errors import UserError
from llmsuite.inference.decoder import Cache, Decoder, join, keep_rows, num_columns
from llmsuite.inference.guided import Guide
from llmsuite.inference.pieces import Reading, adapters_of, in_groups, piece_factor
from llmsuite.inference.sampling import Sampling, choose, forbid, generator, log_softmax, penalise
from llmsuite.inference.shared_prefixes import Block, SharedPrefixes, num_known
from llmsuite.inference.text import TextStream

FinishReason = Literal["stop", "length"]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a chosen token by the model, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and their log-probabilities, in descending order."""


class Line:
    """One answer that is being decoded."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: set[int],
        text: TextStream | None = None,
        number: int = 0,
        guide: Guide | None = None,
        adapter: str | None = None,
    ):
        """
        Args:
            prompt: token ids, at least one.
            sampling: how to choose, and when to end.
            stop_ids: tokens that end the answer; they are not among its ids.
            text: decodes the answer and looks for stop texts; None to use token ids only.
            number: which answer to this prompt it is; each has its own random numbers.
            guide: the grammar that it follows; None for any text.
            adapter: which one of the decoder it is made with; None for the model as it is.
        """
        self.prompt, self.sampling, self.stop_ids, self.text = list(prompt), sampling, stop_ids, text
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ending: TokenLogprob | None = None
        """The token that ended it, where log-probabilities are kept."""
        self.finished: FinishReason | None = None if sampling.max_new_tokens else "length"
        self.error: Exception | None = None
        """Why it cannot go on."""
        self.num_known = 0
        """Tokens of the prompt whose keys and values were there already, so that they were not computed."""
        self.num_kept = 0
        """Tokens of the prompt whose keys and values were kept for later ones, and were not there before."""
        self._random = generator(sampling.seed, number)
        self._guide, self.adapter = guide, adapter

    def choose(self, logits: np.ndarray) -> int:
        """The next token. logits: [V]."""
        penalised = penalise(logits, self.sampling, self.prompt, self.ids)
        if len(self.ids) < self.sampling.min_new_tokens:
            penalised = forbid(penalised, self.stop_ids)
        if self._guide is not None:
            penalised = self._guide.apply(penalised)
        return choose(penalised, self.sampling, self._random)

    def take(self, token: int, logits: np.ndarray) -> str:
        """Append the chosen token; returns the text that became certain."""
        if token in self.stop_ids:
            self.finished = "stop"
            if self.sampling.num_logprobs is not None:
                self.ending = token_logprob(token, logits, self.sampling.num_logprobs)
            return self.text.finish() if self.text else ""
        self.ids.append(token)
        if self._guide is not None:
            self._guide.take(token)
        if self.sampling.num_logprobs is not None:
            self.logprobs.append(token_logprob(token, logits, self.sampling.num_logprobs))
        released = self.text.push(token) if self.text else ""
        if self.text and self.text.stopped:
            self.finished = "stop"
        elif len(self.ids) == self.sampling.max_new_tokens:
            self.finished = "length"
            released += self.text.finish() if self.text else ""
        return released


def token_logprob(token: int, logits: np.ndarray, count: int) -> TokenLogprob:
    """The log-probability of a token by logits [V], with so many of the most likely ones."""
    values = log_softmax(logits)
    # sorting a whole vocabulary takes far longer than finding those that may be among the first
    likely = np.flatnonzero(values >= np.partition(values, -count)[-count]) if 0 < count < len(values) else None
    order = np.argsort(-values if likely is None else -values[likely], kind="stable")[:count]
    best = order if likely is None else likely[order]
    return TokenLogprob(token, float(values[token]), tuple((int(i), float(values[i])) for i in best))


def check_room(
    prompt: Sequence[int],
    max_new_tokens: int,
    decoder: Decoder,
    what: str = "the prompt",
    option: str = "max_new_tokens",
) -> None:
    """Raises UserError when prompt and answer do not fit the model, or a token is not in its vocabulary; `option` is
    what the length of the answer is asked for with."""
    if not prompt:
        raise UserError(f"{what} has no tokens; the model needs at least one")
    left = decoder.max_length - len(prompt)
    if left < max_new_tokens or left < 0:
        asked = f", and {option} asks for {max_new_tokens} more: at most {left} are left" if left > 0 else ""
        raise UserError(
            f"{what} has {len(prompt)} tokens{asked}; the model's context length is {decoder.max_length}, of prompt "
            "and answer together"
        )
    if not 0 <= min(prompt) <= max(prompt) < decoder.vocab_size:
        raise UserError(f"{what} has token {max(prompt)}; the model's end at {decoder.vocab_size - 1}")


def _joined(first: Cache, padding: np.ndarray, second: Cache, more_padding: np.ndarray) -> tuple[Cache, np.ndarray]:
    """Two caches as one, and the padding of their rows."""
    difference = num_columns(second) - num_columns(first)
    both = [padding + max(difference, 0), more_padding + max(-difference, 0)]
    return join(first, second), np.concatenate(both)


class Batch:
    """The unfinished lines, and their cache."""

    def __init__(
        self,
        decoder: Decoder,
        agree: Callable[[list[int]], list[int]] = lambda tokens: tokens,
        fails_alone: bool = False,
        prefixes: SharedPrefixes | None = None,
        num_tokens: int | None = None,
    ):
        """
        Args:
            decoder: the model.
            agree: where several ranks decode the same batch, maps the choice of this rank to the one that all take.
            fails_alone: whether a line that cannot go on leaves the batch with its `error`; else `advance` raises it.
            prefixes: of prompts that were read before, which are not read again; needs a decoder that
                `shares_prefixes`.
            num_tokens: of prompts, at most, that a pass reads; None for any number. A decoder that does not
                `reads_in_pieces` reads each prompt in one.
        """
        self._decoder, self._agree, self._fails_alone, self._prefixes = decoder, agree, fails_alone, prefixes
        self._num_tokens = num_tokens if getattr(decoder, "reads_in_pieces", True) else None
        self._unread: list[Line] = []
        self._reading: collections.deque[Reading] = collections.deque()
        self.lines: list[Line] = []
        self._padding = np.zeros(0, "int64")
        self._cache: Cache | None = None

    def begin(self, new: Sequence[Line]) -> None:
        """Take new lines, whose prompts `read` reads."""
        self._unread += new

    @property
    def coming(self) -> list[Line]:
        """The lines that have begun and whose prompts have not been read to the end."""
        return [*(line for reading in self._reading for line in reading.lines), *self._unread]

    def read(self) -> list[tuple[Line, str]]:
        """Make one pass over a piece of the prompts that are `coming`; those that are read at the same time take turns.

        Returns:
            Each line whose prompt has come to its end and got its first token, or that failed, with the text that
            became certain.

        When the pass itself raises, its lines are no longer in the batch, and all else is as before. Where lines fail
        alone, it does not raise: each is read by itself then, and fails if that cannot be done either.
        """
        self._open()
        reading = self._reading.popleft()
        try:
            logits = reading.advance(self._decoder, self._num_tokens)
        except Exception as error:  # whatever is wrong with one prompt is no reason to end the others
            if not self._fails_alone:
                raise
            if len(reading.lines) > 1:
                self._reading.extend(Reading([line], [self._known(line)]) for line in reading.lines)
                return []
            reading.lines[0].error = error
            return [(reading.lines[0], "")]
        if not reading.is_done:
            self._reading.append(reading)
            return []
        cache, padding = reading.cache, reading.padding
        assert cache is not None
        if self._prefixes is not None:
            tensors = list(cache)
            for row, line in enumerate(reading.lines):
                line.num_kept = self._prefixes.keep(line.prompt, line.adapter, tensors, row, int(padding[row]))
        if self._cache is not None:
            cache, padding = _joined(self._cache, self._padding, cache, padding)
        self._cache, self._padding = cache, padding
        self.lines = [*self.lines, *reading.lines]
        return self._taken(reading.lines, logits)

    def advance(self, new: Sequence[Line] = ()) -> list[tuple[Line, str]]:
        """Read the prompts of new lines and choose their first tokens, or without any, choose the next token of all.

        Returns:
            Each line that got a token or failed, with the text that became certain. These leave the batch when they
            are finished.

        When a pass itself raises, the batch is as it was before that pass.
        """
        if new:
            self.begin(new)
            steps = []
            while self.coming:
                steps += self.read()
            return steps
        lines = list(self.lines)
        last = np.asarray([[line.ids[-1]] for line in lines], "int64")
        logits, self._cache = self._decoder.forward(last, self._padding, self._cache, **adapters_of(lines))
        return self._taken(lines, logits)

    def _taken(self, lines: Sequence[Line], logits: np.ndarray) -> list[tuple[Line, str]]:
        """Let lines choose by their rows of logits [B, V]; see `advance`."""
        tokens = self._agree([self._act(line, partial(line.choose, row), 0) for line, row in zip(lines, logits)])
        texts = [self._act(line, partial(line.take, t, row), "") for line, t, row in zip(lines, tokens, logits)]
        self.drop([line for line in lines if line.finished or line.error])
        return list(zip(lines, texts))

    def _act(self, line: Line, act: Callable[[], T], instead: T) -> T:
        """What a line does with its row, or a value in its place once it has failed."""
        if line.error is not None:
            return instead
        try:
            return act()
        except Exception as error:  # whatever is wrong with one line is no reason to end the others
            if not self._fails_alone:
                raise
            line.error = error
            return instead

    def _open(self) -> None:
        """Begin to read prompts, but for those that begin as one does that is just being read: they come after it."""
        ready, later = self._unread, list[Line]()
        if ready and self._prefixes is not None and self._prefixes.keeps_some:
            first_new = self._prefixes.first_new
            seen = {first_new(line.prompt, line.adapter) for reading in self._reading for line in reading.lines}
            ready = []
            for line in self._unread:
                key = first_new(line.prompt, line.adapter)
                (later if key is not None and key in seen else ready).append(line)
                seen.add(key)
        self._unread = later
        found = [self._known(line) for line in ready]
        for is_known in (True, False):
            rows = [row for row, blocks in enumerate(found) if bool(blocks) == is_known]
            lengths = [len(ready[row].prompt) - num_known(found[row]) for row in rows]
            most = None if self._num_tokens is None else self._num_tokens * piece_factor(self._decoder)
            for group in in_groups(lengths, most):
                chosen = [rows[number] for number in group]
                self._reading.append(Reading([ready[row] for row in chosen], [found[row] for row in chosen]))

    def _known(self, line: Line) -> list[Block]:
        return [] if self._prefixes is None else self._prefixes.find(line.prompt, line.adapter)

    def drop(self, dropped: Sequence[Line]) -> None:
        """Remove lines: finished ones, or those nobody waits for any more."""
        self._leave_unread(dropped)
        if not dropped or self._cache is None:
            return
        rows = [i for i, line in enumerate(self.lines) if line not in dropped]
        if len(rows) == len(self.lines):
            return
        self.lines = [self.lines[i] for i in rows]
        if not rows:
            self._cache, self._padding = None, np.zeros(0, "int64")
            return
        first = int(self._padding[rows].min())
        self._cache, self._padding = keep_rows(self._cache, rows, first), self._padding[rows] - first

    def _leave_unread(self, dropped: Sequence[Line]) -> None:
        """Remove lines whose prompts have not been read to the end."""
        if not any(line in dropped for line in self.coming):
            return
        self._unread = [line for line in self._unread if line not in dropped]
        left = [reading for reading in self._reading if any(line in dropped for line in reading.lines)]
        for reading in left:  # those that were read together with one begin anew
            self._reading.remove(reading)
            self._unread += [line for line in reading.lines if line not in dropped]
