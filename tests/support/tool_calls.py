"""Calls of tools in answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
from starlette.testclient import TestClient

from llmsuite.inference.prompts import Prompter
from llmsuite.serving.app import make_app
from tests.support.served import TableDecoder, make_service


class Scripted(TableDecoder):
    """Says the same whatever it is asked."""

    script: list[int]
    begin = 0

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Any) -> Any:
        if cache is None:
            self.begin = ids.shape[1]
        return super().forward(ids, padding, cache)

    def logits(self, text: np.ndarray) -> np.ndarray:
        wanted = np.zeros(self.vocab_size, "float32")
        wanted[self.script[min(len(text) - self.begin, len(self.script) - 1)]] = 50
        return wanted


@contextlib.contextmanager
def says(text: str, seen: list[list[int]] | None = None, prompter: Prompter | None = None) -> Iterator[openai.OpenAI]:
    """A client of a model that says a text; `seen` gets the prompts."""
    service = make_service()
    service.prompter = prompter or service.prompter
    tokenizer = service.generator.tokenizer
    decoder: Any = service.generator.decoder
    decoder.__class__ = Scripted
    decoder.script = [*tokenizer.encode(text), tokenizer.eos_id]
    make_sequence = service.generator.make_sequence

    def recording_make_sequence(prompt: Any, *more: Any) -> Any:
        if seen is not None:
            seen.append(list(prompt))
        return make_sequence(prompt, *more)

    service.generator.make_sequence = recording_make_sequence  # type: ignore[method-assign]
    with TestClient(make_app(service)) as http:
        yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=http)


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "sum"}},
]


CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "sum"}</tool_call>'
