"""Keys and values of prompts, for later prompts that begin with the same tokens, such as a system prompt.

They are kept in blocks of tokens. A block is found by its tokens and by the block in front of it, so that prompts share
what they have in common (as vLLM's automatic prefix caching, Kwon et al. 2023, arXiv 2309.06180). The blocks that were
not used for longest go first.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import paddle

from llmsuite.inference.decoder import Cache, num_columns, pad_to

_Parent = int | str | None
"""The number of the block in front; of the first block the adapter, as keys and values are those of the model with
it."""
_Key = tuple[_Parent, tuple[int, ...]]
TOKENS = 32
"""Tokens of a block."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Some tokens of a prompt, behind others."""

    number: int
    columns: Cache
    """The columns of these tokens, of each tensor of a cache [1, …, TOKENS, …]."""

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in self.columns)


class SharedPrefixes:
    """The blocks that are kept. Not for several threads."""

    def __init__(self, max_bytes: int, num_tokens: int = TOKENS):
        """
        Args:
            max_bytes: of all blocks together; 0 keeps none.
            num_tokens: of a block.
        """
        self._max_bytes, self._num_tokens = max_bytes, num_tokens
        self._blocks: collections.OrderedDict[_Key, Block] = collections.OrderedDict()
        self._made = 0
        self.num_bytes = 0
        """Size of the blocks that are there."""

    def find(self, prompt: Sequence[int], adapter: str | None) -> list[Block]:
        """The blocks a prompt begins with, but for its last token, which is read in any case."""
        found = []
        for key, block in self._known(prompt[:-1], adapter):
            if block is None:
                break
            found.append((key, block))
        self._touch([key for key, _ in found])
        return [block for _, block in found]

    @property
    def keeps_some(self) -> bool:
        """Whether there is room for any."""
        return self._max_bytes > 0

    def first_new(self, prompt: Sequence[int], adapter: str | None) -> _Key | None:
        """The first whole block of a prompt that is not there; None where all are, but for the last token."""
        return next((key for key, block in self._known(prompt[:-1], adapter) if block is None), None)

    def keep(self, prompt: Sequence[int], adapter: str | None, cache: Cache, row: int, padding: int) -> int:
        """Keep the whole blocks of a prompt; returns how many tokens are in those that were not there.

        Args:
            prompt: its tokens.
            adapter: which one it was read with.
            cache: has the prompt's keys and values.
            row: of the cache.
            padding: columns of that row in front of the prompt.
        """
        if not self.keeps_some:
            return 0
        keys, start, num_new = [], padding, 0
        for key, block in self._known(prompt, adapter):
            if block is None:
                part = [tensor[row : row + 1, ..., start : start + self._num_tokens, :].clone() for tensor in cache]
                self._made += 1
                block = self._blocks[key] = Block(self._made, part)
                self.num_bytes += block.num_bytes
                num_new += self._num_tokens
            keys.append(key)
            start += self._num_tokens
        self._touch(keys)
        while self.num_bytes > self._max_bytes:
            _, dropped = self._blocks.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
        return num_new

    def clear(self) -> None:
        """Drop all: the weights are others."""
        self._blocks.clear()
        self.num_bytes = 0

    def _known(self, prompt: Sequence[int], adapter: str | None) -> Iterator[tuple[_Key, Block | None]]:
        """The keys of the whole blocks of a prompt, with those that are there. One that is not has to be made before
        the next key is asked for."""
        parent: _Parent = adapter
        for end in range(self._num_tokens, len(prompt) + 1, self._num_tokens):
            key = parent, tuple(prompt[end - self._num_tokens : end])
            yield key, self._blocks.get(key)
            parent = self._blocks[key].number

    def _touch(self, keys: Sequence[_Key]) -> None:
        """These were used now, the first of a prompt last: without it the others are not found, so it goes last."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def num_known(blocks: Sequence[Block]) -> int:
    """Tokens of blocks."""
    return sum(num_columns(block.columns) for block in blocks)


@paddle.no_grad()
def as_cache(prefixes: Sequence[Sequence[Block]], counts: Sequence[int], length: int) -> Cache:
    """The cache of a batch of prompts of which some tokens are known.

    Args:
        prefixes: of each row, at least one block.
        counts: how many of their columns each row takes.
        length: columns of the cache; in front of those that a row takes is padding.
    """
    rows = []
    for blocks, count in zip(prefixes, counts):
        columns = [paddle.concat(list(parts), -2) for parts in zip(*(block.columns for block in blocks))]
        rows.append([pad_to(tensor[..., :count, :], length) for tensor in columns])
    return [paddle.concat(list(tensors)) for tensors in zip(*rows)]
