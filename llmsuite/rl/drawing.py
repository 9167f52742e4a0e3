"""Draws several completions of each prompt, which is read once for all of them.

Completions leave the batch as they end, and those of other prompts join it. The tokens of a completion are a function
of the weights, the prompt and its own random numbers: what else is in the batch changes them by rounding only.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from llmsuite.inference.decoder import Cache, Decoder, join, keep_rows, num_columns
from llmsuite.inference.sampling import draw


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How completions are drawn."""

    num_generations: int
    """Completions of each prompt."""
    max_completion_length: int
    """Tokens, the stop token included."""
    temperature: float
    """0 for the most likely tokens."""
    batch_size: int
    """Completions that are drawn together, unless those of one prompt are more."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and the name of the random numbers of its completions."""

    prompt_ids: tuple[int, ...]
    key: tuple[int, ...]
    """Together with the number of a completion it decides the random numbers."""


@dataclasses.dataclass
class Drawn:
    """Tokens of a completion."""

    uniforms: np.ndarray
    """[max_completion_length]: a random number in [0, 1) for each token."""
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


def request_key(seed: int, step: int, prompt_ids: Sequence[int], occurrence: int = 0) -> tuple[int, ...]:
    """The key of a prompt's completions at a step.

    Args:
        seed: of the recipe.
        step: at which they are drawn.
        prompt_ids: of the prompt.
        occurrence: how many times the same prompt came before in the global batch.
    """
    digest = hashlib.sha256(np.asarray(prompt_ids, "int64").tobytes()).digest()
    return (seed, step, *(int(word) for word in np.frombuffer(digest[:16], "uint32")), occurrence)


def uniforms(key: Sequence[int], number: int, count: int) -> np.ndarray:
    """[count] random numbers in [0, 1) of the `number`-th completion; a smaller count gives the first of them.

    Raw words rather than `Generator.random`: NumPy promises only the raw stream never to change.
    """
    entropy = hashlib.sha256(np.asarray([*key, number], "uint64").tobytes()).digest()
    words = np.random.Philox(key=np.frombuffer(entropy[:16], "uint64")).random_raw(count)
    return (words >> np.uint64(11)).astype("float64") * 2.0**-53


def draw_groups(
    decoder: Decoder, requests: Sequence[Request], drawing: Drawing, stop_ids: Collection[int]
) -> list[list[Drawn]]:
    """The completions of each request, in the order of the requests; those with long prompts are begun first.

    Args:
        decoder: the model.
        requests: each has room in the model for its prompt and a completion of the greatest length.
        drawing: how to draw.
        stop_ids: tokens that end a completion; they are among its ids.

    Raises:
        UserError: the model's logits are not finite.
    """
    groups = [
        [
            Drawn(uniforms(request.key, number, drawing.max_completion_length))
            for number in range(drawing.num_generations)
        ]
        for request in requests
    ]
    fill_groups(decoder, requests, groups, drawing, stop_ids)
    return groups


def fill_groups(
    decoder: Decoder,
    requests: Sequence[Request],
    groups: Sequence[Sequence[Drawn]],
    drawing: Drawing,
    stop_ids: Collection[int],
) -> None:
    """Draw what is empty so far: `draw_groups` of completions each of which has its own random numbers, as many as it
    may have tokens."""
    most = max(map(len, groups), default=1)
    batch = _Batch(decoder, drawing.temperature, stop_ids)
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), requests[i].key))
    waiting = collections.deque(order)
    least = max(1, drawing.batch_size // _REFILLS)
    while waiting or batch.rows:
        room = drawing.batch_size - len(batch.rows)
        if waiting and (not batch.rows or room >= max(least, most)):
            count = max(1, room // most)
            new = [waiting.popleft() for _ in range(min(count, len(waiting)))]
            batch.admit([(requests[i], groups[i]) for i in new])
        else:
            batch.advance()


_REFILLS = 4
"""Prompts join a batch when this part of it is free: each time the caches are copied."""
_LEAVE = 8
"""Completions leave a batch when one in so many has ended: each time the caches are copied."""
_CUT = 4
"""Columns that are padding in all rows are removed when they are this part of all: they are copied one time more."""


class _Batch:
    """The completions that are being drawn, and their cache."""

    def __init__(self, decoder: Decoder, temperature: float, stop_ids: Collection[int]):
        self._decoder, self._temperature, self._stop_ids = decoder, temperature, stop_ids
        self.rows: list[Drawn] = []
        self._padding = np.zeros(0, "int64")
        self._cache: Cache | None = None

    def admit(self, prompts: Sequence[tuple[Request, Sequence[Drawn]]]) -> None:
        """Read prompts, and draw the first token of each of their completions."""
        ids = [request.prompt_ids for request, _ in prompts]
        length = max(map(len, ids))
        padding = np.asarray([length - len(row) for row in ids], "int64")
        padded = np.zeros([len(ids), length], "int64")
        for line, row in zip(padded, ids):
            line[length - len(row) :] = row
        logits, cache = self._decoder.forward(padded, padding, None)
        of_prompt = np.repeat(np.arange(len(prompts)), [len(rows) for _, rows in prompts])
        new = [row for _, rows in prompts for row in rows]
        self._take(new, logits[of_prompt])
        cache, padding = keep_rows(cache, of_prompt.tolist()), padding[of_prompt]
        if self._cache is not None:
            difference = num_columns(cache) - num_columns(self._cache)
            self._padding += max(difference, 0)
            padding = padding + max(-difference, 0)
            cache = join(self._cache, cache)
        self._cache, self._padding = cache, np.concatenate([self._padding, padding])
        self.rows += new
        self._drop()

    def advance(self) -> None:
        """Draw the next token of all."""
        last = np.asarray([[row.ids[-1]] for row in self.rows], "int64")
        logits, self._cache = self._decoder.forward(last, self._padding, self._cache)
        self._take(self.rows, logits)
        self._drop()

    def _take(self, rows: Sequence[Drawn], logits: np.ndarray) -> None:
        at = [i for i, row in enumerate(rows) if row.finish_reason is None]
        taken = [rows[i] for i in at]
        numbers = np.array([row.uniforms[len(row.ids)] for row in taken])
        tokens, logprobs = draw(logits[at], self._temperature, numbers)
        for row, token, logprob in zip(taken, tokens.tolist(), logprobs.tolist()):
            row.ids.append(token)
            row.logprobs.append(logprob)
            if token in self._stop_ids:
                row.finish_reason = "stop"
            elif len(row.ids) == len(row.uniforms):
                row.finish_reason = "length"

    def _drop(self) -> None:
        """Remove completions that have ended, if they are enough, or if one would outgrow the model."""
        kept = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        ended = len(self.rows) - len(kept)
        if not ended or self._cache is None:
            return
        longest = num_columns(self._cache) - int(self._padding.min())
        if ended * _LEAVE < len(self.rows) and longest + 1 < self._decoder.max_length:
            return
        self.rows = [self.rows[i] for i in kept]
        if not kept:
            self._cache, self._padding = None, np.zeros(0, "int64")
            return
        first = int(self._padding[kept].min())
        if first * _CUT < num_columns(self._cache) and longest + 1 < self._decoder.max_length:
            first = 0
        self._cache, self._padding = keep_rows(self._cache, kept, first), self._padding[kept] - first
