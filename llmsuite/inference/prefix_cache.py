"""Prefix cache: keys and values of prompts, for later prompts that begin with the same tokens, e.g. a system prompt.

They are stored in blocks of tokens. The key of a block is its tokens and the block in front of it, so that prompts
share their common beginning (as vLLM's automatic prefix caching, Kwon et al. 2023, arXiv 2309.06180). The least
recently used blocks are dropped first.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import paddle

from llmsuite.inference.decoder import Cache, cache_len, pad_left

_Parent = int | str | None
"""The number of the block in front; for the first block the adapter, because keys and values depend on it."""
_Key = tuple[_Parent, tuple[int, ...]]
BLOCK_SIZE = 32
"""Tokens of a block."""


@dataclasses.dataclass(frozen=True)
class CacheBlock:
    """Consecutive tokens of a prompt, with their keys and values."""

    number: int
    tensors: Cache
    """The positions of these tokens, of each tensor of a cache [1, …, BLOCK_SIZE, …]."""

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in self.tensors)


class PrefixCache:
    """The stored blocks. Not thread-safe."""

    def __init__(self, max_bytes: int, block_size: int = BLOCK_SIZE):
        """
        Args:
            max_bytes: of all blocks together; 0 stores none.
            block_size: tokens of a block.
        """
        self._max_bytes = max_bytes
        self._block_size = block_size
        self._blocks: collections.OrderedDict[_Key, CacheBlock] = collections.OrderedDict()
        self._num_created = 0
        self.num_bytes = 0
        """Size of the stored blocks."""

    def match(self, prompt: Sequence[int], adapter: str | None) -> list[CacheBlock]:
        """The stored blocks at the beginning of a prompt, without its last token, which is always read."""
        found = []
        for key, block in self._blocks_of(prompt[:-1], adapter):
            if block is None:
                break
            found.append((key, block))
        self._touch([key for key, _ in found])
        return [block for _, block in found]

    @property
    def is_enabled(self) -> bool:
        """True where there is room for blocks."""
        return self._max_bytes > 0

    def first_missing_block(self, prompt: Sequence[int], adapter: str | None) -> _Key | None:
        """The key of the first full block of a prompt that is not stored, without its last token; None if all are."""
        return next((key for key, block in self._blocks_of(prompt[:-1], adapter) if block is None), None)

    def store(self, prompt: Sequence[int], adapter: str | None, cache: Cache, row: int, padding: int) -> int:
        """Store the full blocks of a prompt; returns the number of tokens in new blocks.

        Args:
            prompt: its tokens.
            adapter: the adapter it was read with.
            cache: has the prompt's keys and values.
            row: of the cache.
            padding: positions of that row in front of the prompt.
        """
        if not self.is_enabled:
            return 0
        keys = []
        start = padding
        num_new = 0
        for key, block in self._blocks_of(prompt, adapter):
            if block is None:
                part = [tensor[row : row + 1, ..., start : start + self._block_size, :].clone() for tensor in cache]
                self._num_created += 1
                block = self._blocks[key] = CacheBlock(self._num_created, part)
                self.num_bytes += block.num_bytes
                num_new += self._block_size
            keys.append(key)
            start += self._block_size
        self._touch(keys)
        while self.num_bytes > self._max_bytes:
            _, dropped = self._blocks.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
        return num_new

    def clear(self) -> None:
        """Drop all blocks, because the weights have changed."""
        self._blocks.clear()
        self.num_bytes = 0

    def _blocks_of(self, prompt: Sequence[int], adapter: str | None) -> Iterator[tuple[_Key, CacheBlock | None]]:
        """The keys of the full blocks of a prompt, each with its block or None. A missing block has to be created
        before the next key is requested."""
        parent: _Parent = adapter
        for end in range(self._block_size, len(prompt) + 1, self._block_size):
            key = parent, tuple(prompt[end - self._block_size : end])
            yield key, self._blocks.get(key)
            parent = self._blocks[key].number

    def _touch(self, keys: Sequence[_Key]) -> None:
        """Mark blocks as used now. The first block of a prompt is marked last, so that it is dropped last: without it
        the others cannot be found."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def num_cached_tokens(blocks: Sequence[CacheBlock]) -> int:
    """Number of tokens in blocks."""
    return sum(cache_len(block.tensors) for block in blocks)


@paddle.no_grad()
def as_batch_cache(prefixes: Sequence[Sequence[CacheBlock]], counts: Sequence[int], length: int) -> Cache:
    """The cache of a batch of prompts whose beginnings are stored.

    Args:
        prefixes: blocks of each row, at least one.
        counts: number of their positions that each row uses.
        length: positions of the cache; those in front of the used ones are padding.
    """
    rows = []
    for blocks, count in zip(prefixes, counts):
        by_tensor = zip(*(block.tensors for block in blocks))
        tensors = [paddle.concat(list(parts), -2) for parts in by_tensor]
        rows.append([pad_left(tensor[..., :count, :], length) for tensor in tensors])
    return [paddle.concat(list(tensors)) for tensors in zip(*rows)]
