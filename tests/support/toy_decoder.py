"""A decoder whose logits are a table, and a tokenizer with a word for every id: for tests of what is built on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.inference.decoder import Cache, DecoderTraits


class ToyDecoder:
    """The logits of a token follow from the two tokens before it; its cache is the text, so a mixed-up row shows."""

    traits = DecoderTraits()

    def __init__(self, vocab_size: int, seed: int = 0, max_length: int = 64, scale: float = 2.0):
        self.table = np.random.default_rng(seed).normal(0, scale, [vocab_size + 1, vocab_size, vocab_size])
        self.table = self.table.astype("float32")
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.batch_sizes: list[int] = []

    def logits(self, text: Sequence[int]) -> np.ndarray:
        """Logits of what follows a text."""
        before = text[-2] if len(text) > 1 else self.vocab_size
        return self.table[before, text[-1]]

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        text = paddle.to_tensor(ids).unsqueeze(-1)
        if cache is not None:
            text = paddle.concat([cache[0], text], 1)
        self.batch_sizes.append(len(ids))
        rows = text.squeeze(-1).numpy()
        return np.stack([self.logits(row[start:]) for row, start in zip(rows, padding)]), [text]


class ToyTokenizer:
    """Ids are looked up in a list of pieces, which are bytes: a piece may be a part of a character."""

    special_texts: frozenset[str] = frozenset()

    def __init__(self, pieces: Sequence[bytes], eos_id: int = 0):
        self.pieces = pieces
        self.eos_id = eos_id

    def decode(self, ids: Sequence[int]) -> str:
        """One token for each byte, like byte-level tokenizers."""
        return b"".join(self.pieces[i] for i in ids if i != self.eos_id).decode("utf-8", errors="replace")


def as_tokenizer(toy: ToyTokenizer) -> Any:
    """For parameters of the type of the real one."""
    return toy
