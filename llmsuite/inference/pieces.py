"""Prompts in pieces: a pass reads a bounded number of their tokens, so that answers beside them go on in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from llmsuite.inference.decoder import TWICE, Cache, Decoder, num_columns, piece_length
from llmsuite.inference.shared_prefixes import Block, as_cache, num_known


class Prompted(Protocol):
    """What has a prompt to be read: a line of a batch."""

    prompt: list[int]
    adapter: str | None
    num_known: int


def in_groups(lengths: Sequence[int], num_tokens: int | None, num_rows: int | None = None) -> list[list[int]]:
    """Texts that are read together, in their order.

    Args:
        lengths: tokens of each text.
        num_tokens: most tokens of a group, where all are padded to its longest; a longer text is alone. None for any.
        num_rows: most texts of a group; None for any number.
    """
    groups: list[list[int]] = []
    width = 0
    for number, length in enumerate(lengths):
        if groups:
            count, width = len(groups[-1]) + 1, max(width, length)
            if (num_tokens is None or count * width <= num_tokens) and (num_rows is None or count <= num_rows):
                groups[-1].append(number)
                continue
        groups.append([number])
        width = length
    return groups


def piece_factor(decoder: Decoder) -> int:
    """See `ModelDecoder`."""
    return int(getattr(decoder, "piece_factor", 1))


def adapters_of(lines: Sequence[Prompted]) -> dict[str, Any]:
    """What a decoder with adapters is told of the rows of a pass; nothing where no row has one."""
    names = [line.adapter for line in lines]
    return {"adapters": names} if any(name is not None for name in names) else {}


class Reading:
    """Prompts that are being read, but for their beginnings that are known. All rows read as many columns as the
    one that has most to read."""

    def __init__(self, lines: Sequence[Any], prefixes: Sequence[Sequence[Block]]):
        """
        Args:
            lines: have the prompts; several only where one pass reads them.
            prefixes: blocks that the prompt of each line begins with: of all, or of none.
        """
        self.lines = list(lines)
        lengths = [len(line.prompt) for line in lines]
        width = max(lengths)
        self.padding = np.asarray([width - length for length in lengths], "int64")
        """Columns in front of each prompt."""
        num_read = max(length - num_known(blocks) for length, blocks in zip(lengths, prefixes))
        self.cache: Cache | None = None
        if num_read < width:
            counts = [max(0, length - num_read) for length in lengths]
            self.cache = as_cache(prefixes, counts, width - num_read)
        self._ids = np.zeros([len(lines), num_read], "int64")
        self._done = 0
        for row, line in zip(self._ids, lines):
            text = line.prompt[-num_read:]
            row[num_read - len(text) :] = text
            line.num_known = len(line.prompt) - len(text)

    @property
    def is_done(self) -> bool:
        """Whether everything has been read."""
        return self._done == self._ids.shape[1]

    def advance(self, decoder: Decoder, num_tokens: int | None) -> np.ndarray:
        """One pass over the next columns, a piece of so many tokens (`piece_length`); returns the logits [B, V] behind
        them. When it raises, nothing has been read."""
        columns = None
        if num_tokens is not None:
            num_before = 0 if self.cache is None else num_columns(self.cache)
            twice = int(getattr(decoder, "twice", TWICE))
            columns = piece_length(num_tokens * piece_factor(decoder), len(self.lines), num_before, twice)
        ids = self._ids[:, self._done :][:, :columns]
        logits, self.cache = decoder.forward(ids, self.padding, self.cache, **adapters_of(self.lines))
        self._done += ids.shape[1]
        return logits
