"""A service whose model is a table, in which some tokens do harm."""

from __future__ import annotations

import numpy as np

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.decoder import Cache
from llmsuite.inference.generate import Generator
from llmsuite.inference.prompts import Prompter
from llmsuite.serving.limits import Limits
from llmsuite.serving.metrics import Metrics
from llmsuite.serving.service import Service
from tests.support.paths import DATA
from tests.support.toy_decoder import ToyDecoder

NAN = 500
RAISES = 501
"""Tokens of a prompt: its logits are not numbers, or no pass can read it."""


class TableDecoder(ToyDecoder):
    """A decoder whose next token depends on the last one only, with the vocabulary of a real tokenizer."""

    def __init__(self, vocab_size: int, max_length: int = 4096):
        self.table = np.random.default_rng(0).normal(0, 2, [vocab_size, vocab_size]).astype("float32")
        # answers are as long as they may be, and do no harm
        self.table[:, [0, 1, 2, NAN, RAISES]] = -np.inf
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.batch_sizes: list[int] = []

    def logits(self, text: np.ndarray) -> np.ndarray:
        return self.table[text[-1]] * np.float32("nan" if NAN in text else 1)

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        if (ids == RAISES).any():
            raise ArithmeticError("a pass that fails")
        return super().forward(ids, padding, cache)


def make_service(limits: Limits | None = None, control_tokens: bool = False) -> Service:
    tokenizer = TextTokenizer(DATA / "tokenizer")
    generator = Generator(TableDecoder(tokenizer.vocab_size), tokenizer)
    prompter = Prompter(tokenizer, "chatml", control_tokens=control_tokens)
    return Service(generator, prompter, "toy", limits or Limits(max_new_tokens=4000), Metrics())
