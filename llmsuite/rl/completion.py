"""A completion that was drawn for a prompt: what rewards see, and what training learns from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion of one prompt. Its ids are those that were drawn: they are never made of the text again."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    """The tokens drawn, with the stop token that ended them."""
    logprobs: Sequence[float]
    """Log-probabilities of `ids`, under the distribution they were drawn from: the temperature is applied."""
    finish_reason: Literal["stop", "length"]
    """length: it reached the limit of tokens and has no stop token."""
    text: str
    """The completion without its stop token."""
    columns: Mapping[str, Any]
    """The other columns of the prompt's row, such as its answer."""
    group: int
    """Number of the prompt in the global batch. The completions of a prompt are a group, which is never cut."""
    number: int
    """Number of the completion in its group."""
    prompt: str = ""
    """The prompt as text, as the chat template renders it."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"
