"""Continuous batching: sequences join and leave the batch at any pass, and each decodes as it would alone."""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.inference.chunked_prefill import Prefill, adapters_of, group_prompts
from llmsuite.inference.decoder import Cache, Decoder, cache_len, join_caches, select_rows
from llmsuite.inference.guided import Guide
from llmsuite.inference.prefix_cache import CacheBlock, PrefixCache, num_cached_tokens
from llmsuite.inference.sampling import (
    Sampling,
    apply_penalties,
    log_softmax,
    mask_tokens,
    random_generator,
    sample_token,
)
from llmsuite.inference.text import TextStream

FinishReason = Literal["stop", "length"]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a sampled token by the model, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and their log-probabilities, in descending order."""


class BatchSequence(abc.ABC):
    """A row of a batch: a prompt and what is sampled after it. How a token is sampled is up to the sequence."""

    def __init__(self, prompt: Sequence[int], adapter: str | None = None):
        """
        Args:
            prompt: token ids, at least one.
            adapter: name of the adapter of the decoder; None for the base model.
        """
        self.prompt = list(prompt)
        self.adapter = adapter
        self.finish_reason: FinishReason | None = None
        """The reason why it has ended; None while it is decoded."""
        self.error: Exception | None = None
        """The reason why it cannot continue."""
        self.last_token = 0
        """The newest token, which the next pass reads. The batch sets it."""
        self.num_cached_tokens = 0
        """Tokens of the prompt whose keys and values came from the prefix cache."""
        self.num_stored_tokens = 0
        """Tokens of the prompt whose keys and values were added to the prefix cache."""

    @property
    def has_ended(self) -> bool:
        """True once no more tokens are sampled."""
        return self.finish_reason is not None or self.error is not None

    @abc.abstractmethod
    def sample(self, logits: np.ndarray) -> int:
        """Sample the next token. logits: [V]."""

    @abc.abstractmethod
    def append(self, token: int, logits: np.ndarray) -> str:
        """Append the sampled token, and set `finish_reason` if it is the last one; returns the text that became
        certain. logits: [V]."""


class DecodingSequence(BatchSequence):
    """A prompt and the answer to it that is being decoded."""

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
            sampling: sampling parameters and limits.
            stop_ids: tokens that end the answer; they are not among its ids.
            text: decodes the answer and looks for stop texts; None to use token ids only.
            number: index of this answer among those to the same prompt; each has its own random numbers.
            guide: the grammar that the answer follows; None for any text.
            adapter: name of the adapter of the decoder; None for the base model.
        """
        super().__init__(prompt, adapter)
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.text = text
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.stop_logprob: TokenLogprob | None = None
        """The stop token, where log-probabilities are kept."""
        if not sampling.max_new_tokens:
            self.finish_reason = "length"
        self._random = random_generator(sampling.seed, number)
        self._guide = guide

    def sample(self, logits: np.ndarray) -> int:
        """Sample the next token. logits: [V]."""
        logits = apply_penalties(logits, self.sampling, self.prompt, self.ids)
        if len(self.ids) < self.sampling.min_new_tokens:
            logits = mask_tokens(logits, self.stop_ids)
        if self._guide is not None:
            logits = self._guide.apply(logits)
        return sample_token(logits, self.sampling, self._random)

    def append(self, token: int, logits: np.ndarray) -> str:
        """Append the sampled token; returns the text that became certain. logits: [V]."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            if self.sampling.num_logprobs is not None:
                self.stop_logprob = token_logprob(token, logits, self.sampling.num_logprobs)
            return self.text.finish() if self.text else ""
        self.ids.append(token)
        if self._guide is not None:
            self._guide.accept(token)
        if self.sampling.num_logprobs is not None:
            self.logprobs.append(token_logprob(token, logits, self.sampling.num_logprobs))
        released = self.text.push(token) if self.text else ""
        if self.text and self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.ids) == self.sampling.max_new_tokens:
            self.finish_reason = "length"
            released += self.text.finish() if self.text else ""
        return released


def token_logprob(token: int, logits: np.ndarray, count: int) -> TokenLogprob:
    """The log-probability of a token by logits [V], with those of the `count` most likely tokens."""
    values = log_softmax(logits)
    candidates = np.arange(len(values))
    if 0 < count < len(values):
        # sorting a full vocabulary takes far longer than finding the candidates for the first places
        candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    best = candidates[np.argsort(-values[candidates], kind="stable")[:count]]
    return TokenLogprob(token, float(values[token]), tuple((int(i), float(values[i])) for i in best))


def check_context_length(
    prompt: Sequence[int],
    max_new_tokens: int,
    decoder: Decoder,
    what: str = "the prompt",
    option: str = "max_new_tokens",
) -> None:
    """Check that prompt and answer fit the model.

    Args:
        prompt: token ids.
        max_new_tokens: length of the answer.
        decoder: the model.
        what: name of the prompt, for messages.
        option: the option that sets the length of the answer, for messages.

    Raises:
        UserError: they are longer than the context, or a token is not in the vocabulary.
    """
    if not prompt:
        raise UserError(f"{what} has no tokens; the model needs at least one")
    left = decoder.max_length - len(prompt)
    if left < max_new_tokens or left < 0:
        answer = f", and {option} asks for {max_new_tokens} more: at most {left} are left" if left > 0 else ""
        raise UserError(
            f"{what} has {len(prompt)} tokens{answer}; the model's context length is {decoder.max_length}, of prompt "
            "and answer together"
        )
    if not 0 <= min(prompt) <= max(prompt) < decoder.vocab_size:
        raise UserError(f"{what} has token {max(prompt)}; the model's vocabulary ends at {decoder.vocab_size - 1}")


def _joined(first: Cache, padding: np.ndarray, second: Cache, more_padding: np.ndarray) -> tuple[Cache, np.ndarray]:
    """Join two caches, and the padding of their rows."""
    difference = cache_len(second) - cache_len(first)
    both = [padding + max(difference, 0), more_padding + max(-difference, 0)]
    return join_caches(first, second), np.concatenate(both)


@dataclasses.dataclass(frozen=True)
class Compaction:
    """When ended sequences and padding leave a batch. The KV cache is copied each time, so that it is worth waiting
    where no client waits for the memory; an ended sequence goes through the passes until then."""

    min_ended: float = 0.0
    """Ended sequences leave when they are this fraction of the batch."""
    min_padding: float = 0.0
    """Leading positions that are padding in all rows leave, with ended sequences, when they are this fraction of the
    cache length."""


class Batch:
    """The sequences that are being decoded, and their cache."""

    def __init__(
        self,
        decoder: Decoder,
        agree: Callable[[list[int]], list[int]] = lambda tokens: tokens,
        isolates_failures: bool = False,
        prefix_cache: PrefixCache | None = None,
        chunk_size: int | None = None,
        compaction: Compaction = Compaction(),  # noqa: B008 - it is frozen
    ):
        """
        Args:
            decoder: the model.
            agree: where several ranks decode the same batch, maps the tokens of this rank to those that all ranks use.
            isolates_failures: a sequence that cannot continue leaves the batch with its `error`; else `advance` raises
                the error.
            prefix_cache: keys and values of earlier prompts; needs a decoder that `supports_prefix_cache`.
            chunk_size: most prompt tokens of a pass; None for no limit. A decoder that does not
                `supports_chunked_prefill` reads each prompt in one pass.
            compaction: when ended sequences leave; at once by default.
        """
        self._decoder = decoder
        self._agree = agree
        self._isolates_failures = isolates_failures
        self._prefix_cache = prefix_cache
        self._chunk_size = chunk_size if decoder.traits.supports_chunked_prefill else None
        self._compaction = compaction
        self._queued: list[list[BatchSequence]] = []
        self._prefills: collections.deque[Prefill[BatchSequence]] = collections.deque()
        self.sequences: list[BatchSequence] = []
        """Sequences whose prompts have been read: rows of the cache."""
        self._padding = np.zeros(0, "int64")
        self._cache: Cache | None = None

    def add(self, new: Sequence[BatchSequence]) -> None:
        """Add new sequences, whose prompts `prefill` reads."""
        self.add_groups([[sequence] for sequence in new])

    def add_groups(self, groups: Sequence[Sequence[BatchSequence]]) -> None:
        """Add new sequences, in groups of the same prompt and adapter: `prefill` reads the prompt of a group once."""
        self._queued += [list(group) for group in groups]

    @property
    def prefilling(self) -> list[BatchSequence]:
        """The sequences that were added and whose prompts have not been read to the end."""
        reading = [sequence for prefill in self._prefills for sequence in prefill.sequences]
        return [*reading, *(sequence for group in self._queued for sequence in group)]

    def prefill(self, num_tokens: int | None = None) -> list[tuple[BatchSequence, str]]:
        """Make one pass over a chunk of the prompts that are `prefilling`. Groups of prompts take turns.

        Args:
            num_tokens: most tokens of this chunk; None for the batch's `chunk_size`. It is ignored where prompts are
                read in one pass.

        Returns:
            Each sequence whose prompt was read to the end and that got its first token, or that failed, with the text
            that became certain.

        When the pass itself raises, its sequences are no longer in the batch, and everything else is as before. With
        `isolates_failures` it does not raise: each sequence of the pass is then read alone, and fails if that fails
        too.
        """
        self._start_prefills()
        prefill = self._prefills.popleft()
        if self._chunk_size is None or num_tokens is None:
            num_tokens = self._chunk_size
        try:
            logits = prefill.advance(self._decoder, num_tokens)
        except Exception as error:  # a fault of one prompt is no reason to end the others
            if not self._isolates_failures:
                raise
            if len(prefill.groups) > 1:
                self._prefills.extend(Prefill([group], [self._match(group)]) for group in prefill.groups)
                return []
            for sequence in prefill.sequences:
                sequence.error = error
            return [(sequence, "") for sequence in prefill.sequences]
        if not prefill.is_done:
            self._prefills.append(prefill)
            return []
        cache = prefill.cache
        padding = prefill.padding
        assert cache is not None
        if self._prefix_cache is not None:
            tensors = list(cache)
            for row, group in enumerate(prefill.groups):
                start = int(padding[row])
                num_stored = self._prefix_cache.store(group[0].prompt, group[0].adapter, tensors, row, start)
                for sequence in group:
                    sequence.num_stored_tokens = num_stored
        prompt_of_row = [number for number, group in enumerate(prefill.groups) for _ in group]
        if len(prompt_of_row) > len(prefill.groups):  # each sequence of a group goes on from the same keys and values
            cache = select_rows(cache, prompt_of_row)
            padding = padding[prompt_of_row]
            logits = logits[prompt_of_row]
        if self._cache is not None:
            cache, padding = _joined(self._cache, self._padding, cache, padding)
        self._cache = cache
        self._padding = padding
        self.sequences = [*self.sequences, *prefill.sequences]
        return self._append_tokens(prefill.sequences, logits)

    def start(self, groups: Sequence[Sequence[BatchSequence]]) -> list[tuple[BatchSequence, str]]:
        """Add groups of new sequences, read their prompts to the end and sample their first tokens; see
        `advance`."""
        self.add_groups(groups)
        steps = []
        while self.prefilling:
            steps += self.prefill()
        return steps

    def advance(self, new: Sequence[BatchSequence] = ()) -> list[tuple[BatchSequence, str]]:
        """Read the prompts of new sequences and sample their first tokens, or without new ones, sample the next token
        of all.

        Returns:
            Each sequence that got a token or failed, with the text that became certain. Finished and failed sequences
            leave the batch, as its `Compaction` decides.

        When a pass itself raises, the batch is as it was before that pass.
        """
        if new:
            return self.start([[sequence] for sequence in new])
        sequences = list(self.sequences)
        last = np.asarray([[sequence.last_token] for sequence in sequences], "int64")
        logits, self._cache = self._decoder.forward(last, self._padding, self._cache, **adapters_of(sequences))
        return self._append_tokens(sequences, logits)

    def _append_tokens(self, sequences: Sequence[BatchSequence], logits: np.ndarray) -> list[tuple[BatchSequence, str]]:
        """Sample a token of each sequence that has not ended by its row of logits [B, V], and append it; see
        `advance`."""
        active = [(one, row) for one, row in zip(sequences, logits) if not one.has_ended]
        sampled = [self._run(one, partial(one.sample, row), 0) for one, row in active]
        steps = []
        for (one, row), token in zip(active, self._agree(sampled)):
            one.last_token = token
            steps.append((one, self._run(one, partial(one.append, token, row), "")))
        self._remove_ended()
        return steps

    def _remove_ended(self) -> None:
        """Remove ended sequences, if there are enough of them or one would exceed the positions of the model."""
        ended = [sequence for sequence in self.sequences if sequence.has_ended]
        if len(ended) >= self._compaction.min_ended * len(self.sequences) or self._is_full:
            self.remove(ended)

    @property
    def _is_full(self) -> bool:
        """True where a row has as many positions as the model: the next pass may not be made with it."""
        if self._cache is None:
            return False
        return cache_len(self._cache) - int(self._padding.min()) + 1 >= self._decoder.max_length

    def _run(self, sequence: BatchSequence, act: Callable[[], T], default: T) -> T:
        """Call a function of a sequence; the default once the sequence has failed."""
        if sequence.error is not None:
            return default
        try:
            return act()
        except Exception as error:  # a fault of one sequence is no reason to end the others
            if not self._isolates_failures:
                raise
            sequence.error = error
            return default

    def _start_prefills(self) -> None:
        """Start to read the queued prompts, except those that share a block with a prompt that is being read: these
        wait, and find the block in the cache afterwards."""
        ready = self._queued
        later = list[list[BatchSequence]]()
        if ready and self._prefix_cache is not None and self._prefix_cache.is_enabled:
            missing = self._prefix_cache.first_missing_block
            running = [group[0] for prefill in self._prefills for group in prefill.groups]
            in_progress = {missing(sequence.prompt, sequence.adapter) for sequence in running}
            ready = []
            for group in self._queued:
                key = missing(group[0].prompt, group[0].adapter)
                if key is not None and key in in_progress:
                    later.append(group)
                else:
                    ready.append(group)
                in_progress.add(key)
        self._queued = later
        found = [self._match(group) for group in ready]
        for is_cached in (True, False):
            rows = [row for row, blocks in enumerate(found) if bool(blocks) == is_cached]
            lengths = [len(ready[row][0].prompt) - num_cached_tokens(found[row]) for row in rows]
            most = None
            if self._chunk_size is not None:
                most = self._chunk_size * self._decoder.traits.prefill_speedup
            for together in group_prompts(lengths, most):
                members = [rows[number] for number in together]
                self._prefills.append(Prefill([ready[row] for row in members], [found[row] for row in members]))

    def _match(self, group: Sequence[BatchSequence]) -> list[CacheBlock]:
        """The cached blocks at the beginning of the prompt of a group."""
        if self._prefix_cache is None:
            return []
        return self._prefix_cache.match(group[0].prompt, group[0].adapter)

    def remove(self, removed: Sequence[BatchSequence]) -> None:
        """Remove sequences: finished ones, or those no client waits for any more."""
        self._remove_prefilling(removed)
        if not removed or self._cache is None:
            return
        rows = [i for i, sequence in enumerate(self.sequences) if sequence not in removed]
        if len(rows) == len(self.sequences):
            return
        is_full = self._is_full
        self.sequences = [self.sequences[i] for i in rows]
        if not rows:
            self._cache = None
            self._padding = np.zeros(0, "int64")
            return
        first = int(self._padding[rows].min())
        if first < self._compaction.min_padding * cache_len(self._cache) and not is_full:
            first = 0
        self._cache = select_rows(self._cache, rows, first)
        self._padding = self._padding[rows] - first

    def _remove_prefilling(self, removed: Sequence[BatchSequence]) -> None:
        """Remove sequences whose prompts have not been read to the end."""
        if not any(sequence in removed for sequence in self.prefilling):
            return
        self._queued = _without(self._queued, removed)
        for prefill in list(self._prefills):
            kept = _without(prefill.groups, removed)
            if kept != prefill.groups:  # the others of the same pass start again
                self._prefills.remove(prefill)
                self._queued += kept


def _without(groups: Sequence[Sequence[BatchSequence]], removed: Sequence[BatchSequence]) -> list[list[BatchSequence]]:
    """The groups without some sequences, and without groups of which none is left."""
    kept = []
    for group in groups:
        left = [sequence for sequence in group if sequence not in removed]
        if left:
            kept.append(left)
    return kept
