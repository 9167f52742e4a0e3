"""Chunked prefill: a pass reads a bounded number of prompt tokens, so that decoding continues between two chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from llmsuite.inference.decoder import Cache, Decoder, cache_len, chunk_length
from llmsuite.inference.prefix_cache import CacheBlock, as_batch_cache, num_cached_tokens


class Prompted(Protocol):
    """A prompt to read: a sequence of a batch."""

    prompt: list[int]
    adapter: str | None
    num_cached_tokens: int


S = TypeVar("S", bound=Prompted)


def group_prompts(lengths: Sequence[int], num_tokens: int | None, num_rows: int | None = None) -> list[list[int]]:
    """Indices of the texts that are read together, in their order.

    Args:
        lengths: tokens of each text.
        num_tokens: most tokens of a group, where all are padded to its longest; a longer text is alone. None for any.
        num_rows: most texts of a group; None for any number.
    """
    groups: list[list[int]] = []
    width = 0
    for number, length in enumerate(lengths):
        if groups:
            count = len(groups[-1]) + 1
            width = max(width, length)
            if (num_tokens is None or count * width <= num_tokens) and (num_rows is None or count <= num_rows):
                groups[-1].append(number)
                continue
        groups.append([number])
        width = length
    return groups


def adapters_of(sequences: Sequence[Prompted]) -> dict[str, Any]:
    """The keyword argument `adapters` of a decoder's pass over these rows; empty where no row has an adapter."""
    names = [sequence.adapter for sequence in sequences]
    return {"adapters": names} if any(name is not None for name in names) else {}


class Prefill(Generic[S]):
    """Prompts that are read together, without their cached beginnings. All rows read as many positions as the one that
    has most to read."""

    def __init__(self, groups: Sequence[Sequence[S]], prefixes: Sequence[Sequence[CacheBlock]]):
        """
        Args:
            groups: the sequences of each prompt, which is a row; several prompts only where one pass reads them.
            prefixes: cached blocks at the beginning of each prompt: of all, or of none.
        """
        self.groups = [list(group) for group in groups]
        prompts = [group[0].prompt for group in groups]
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        self.padding = np.asarray([width - length for length in lengths], "int64")
        """[B]: positions in front of each prompt."""
        num_read = max(length - num_cached_tokens(blocks) for length, blocks in zip(lengths, prefixes))
        self.cache: Cache | None = None
        if num_read < width:
            counts = [max(0, length - num_read) for length in lengths]
            self.cache = as_batch_cache(prefixes, counts, width - num_read)
        self._ids = np.zeros([len(groups), num_read], "int64")
        self._done = 0
        for row, prompt, group in zip(self._ids, prompts, groups):
            text = prompt[-num_read:]
            row[num_read - len(text) :] = text
            for sequence in group:
                sequence.num_cached_tokens = len(prompt) - len(text)

    @property
    def sequences(self) -> list[S]:
        """The sequences of all prompts."""
        return [sequence for group in self.groups for sequence in group]

    @property
    def is_done(self) -> bool:
        """True when every prompt has been read to the end."""
        return self._done == self._ids.shape[1]

    def advance(self, decoder: Decoder, num_tokens: int | None) -> np.ndarray:
        """Make one pass over the next chunk, of the length that `chunk_length` gives for `num_tokens`; returns the
        logits [B, V] of its last position. When it raises, nothing has been read."""
        length = None
        if num_tokens is not None:
            num_before = 0 if self.cache is None else cache_len(self.cache)
            num_tokens *= decoder.traits.prefill_speedup
            length = chunk_length(num_tokens, len(self.groups), num_before, decoder.traits.double_cost_len)
        ids = self._ids[:, self._done :][:, :length]
        logits, self.cache = decoder.forward(
            ids, self.padding, self.cache, **adapters_of([group[0] for group in self.groups])
        )
        self._done += ids.shape[1]
        return logits
