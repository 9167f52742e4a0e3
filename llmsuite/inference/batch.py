"""Continuous batching: sequences join and leave the batch at any pass, and each decodes as it would alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from llmsuite.errors import UserError
from llmsuite.inference.decoder import Cache, Decoder, join, keep_rows, num_columns
from llmsuite.inference.guided import Guide
from llmsuite.inference.sampling import Sampling, choose, forbid, generator, log_softmax, penalise
from llmsuite.inference.shared_prefixes import Block, SharedPrefixes, as_cache, num_known
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


def _adapters(lines: Sequence[Line]) -> dict[str, Any]:
    """What a decoder with adapters is told of the rows of a pass; nothing where no row has one."""
    names = [line.adapter for line in lines]
    return {"adapters": names} if any(name is not None for name in names) else {}


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
    ):
        """
        Args:
            decoder: the model.
            agree: where several ranks decode the same batch, maps the choice of this rank to the one that all take.
            fails_alone: whether a line that cannot go on leaves the batch with its `error`; else `advance` raises it.
            prefixes: of prompts that were read before, which are not read again; needs a decoder that
                `shares_prefixes`.
        """
        self._decoder, self._agree, self._fails_alone, self._prefixes = decoder, agree, fails_alone, prefixes
        self.lines: list[Line] = []
        self._padding = np.zeros(0, "int64")
        self._cache: Cache | None = None

    def advance(self, new: Sequence[Line] = ()) -> list[tuple[Line, str]]:
        """Make one pass: the first token of new lines, or without any, the next token of all.

        Returns:
            Each line that got a token or failed, with the text that became certain. These leave the batch when they
            are finished.

        When the pass itself raises, the batch is as it was before.
        """
        if new:
            lines, logits, cache, padding = self._prefill(new)
            if self._cache is not None:
                cache, padding = _joined(self._cache, self._padding, cache, padding)
            self._padding = padding
            self.lines = [*self.lines, *lines]
        else:
            lines = list(self.lines)
            last = np.asarray([[line.ids[-1]] for line in lines], "int64")
            logits, cache = self._decoder.forward(last, self._padding, self._cache, **_adapters(lines))
        self._cache = cache
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

    def _prefill(self, new: Sequence[Line]) -> tuple[list[Line], np.ndarray, Cache, np.ndarray]:
        """The first passes of new lines, over their prompts.

        There is one for those of which nothing is known, one where the beginnings are, and one for lines that begin as
        another one of them does, which is read first.

        Returns:
            The lines in another order, with their logits, cache and padding.
        """
        if self._prefixes is None:
            return list(new), *self._read(new, [[] for _ in new])
        made: tuple[list[Line], np.ndarray, Cache, np.ndarray] | None = None
        for group in self._in_turn(new):
            found = [self._prefixes.find(line.prompt, line.adapter) for line in group]
            for is_known in (True, False):
                rows = [row for row, blocks in enumerate(found) if bool(blocks) == is_known]
                if not rows:
                    continue
                lines = [group[row] for row in rows]
                logits, cache, padding = self._read(lines, [found[row] for row in rows])
                tensors = list(cache)
                for row, line in enumerate(lines):
                    begin = int(padding[row])
                    line.num_kept = self._prefixes.keep(line.prompt, line.adapter, tensors, row, begin)
                if made is not None:
                    cache, padding = _joined(made[2], made[3], cache, padding)
                    lines, logits = [*made[0], *lines], np.concatenate([made[1], logits])
                made = lines, logits, cache, padding
        assert made is not None, "there are new lines"
        return made

    def _in_turn(self, new: Sequence[Line]) -> list[list[Line]]:
        """New lines in the order in which they are read: those whose next block another one reads too come after it."""
        assert self._prefixes is not None
        if not self._prefixes.keeps_some:
            return [list(new)]
        seen: set[Any] = set()
        first, later = list[Line](), list[Line]()
        for line in new:
            key = self._prefixes.first_new(line.prompt, line.adapter)
            (later if key in seen else first).append(line)
            if key is not None:
                seen.add(key)
        return [group for group in (first, later) if group]

    def _read(self, lines: Sequence[Line], prefixes: Sequence[Sequence[Block]]) -> tuple[np.ndarray, Cache, np.ndarray]:
        """A pass over prompts, but for the beginnings that are known. All rows read as many columns as the one that
        has most to read."""
        lengths = [len(line.prompt) for line in lines]
        width = max(lengths)
        padding = np.asarray([width - length for length in lengths], "int64")
        num_read = max(length - num_known(blocks) for length, blocks in zip(lengths, prefixes))
        known = None
        if num_read < width:
            known = as_cache(prefixes, [max(0, length - num_read) for length in lengths], width - num_read)
        ids = np.zeros([len(lines), num_read], "int64")
        for row, line in zip(ids, lines):
            text = line.prompt[-num_read:]
            row[num_read - len(text) :] = text
            line.num_known = len(line.prompt) - len(text)
        logits, cache = self._decoder.forward(ids, padding, known, **_adapters(lines))
        return logits, cache, padding

    def drop(self, dropped: Sequence[Line]) -> None:
        """Remove lines: finished ones, or those nobody waits for any more."""
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
